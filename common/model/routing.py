"""Which experts a token goes to, and with which weights.

a_e = sqrt(softplus(x . gate_e));  T = the k largest a_e + bias_e (learned) or tid2eid[token] (hash)
w_e = gamma a_e / (sum over T of a + 1e-20)       the bias only selects
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.model.activations import sqrt_softplus
from common.model.config import ModelConfig
from common.model.weights import WeightReader

WEIGHT_SUM_EPS = 1e-20


def top_experts(scores: Tensor, count: int) -> Tensor:
    """The `count` largest of scores [T, E], ties to the lower expert: [T, count] int64."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


class Router:
    """One layer's router; `prefix` is e.g. "layers.3.ffn.gate"."""

    def __init__(self, reader: WeightReader, prefix: str, config: ModelConfig, *, hash_routed: bool) -> None:
        count = config.num_experts
        self._chosen = config.experts_per_token
        self._factor = config.routed_scaling_factor
        self._gate = reader.dense((f"{prefix}.weight", count, config.hidden_size), dtype=torch.float32)
        self._table: Tensor | None = None
        self._bias: Tensor | None = None
        if hash_routed:
            self._table = reader.table(f"{prefix}.tid2eid", config.vocab_size, self._chosen)
            if int(self._table.min()) < 0 or int(self._table.max()) >= count:
                raise ValueError(f"{prefix}.tid2eid names experts outside 0 ... {count - 1}")
        else:
            self._bias = reader.vector(f"{prefix}.bias", count)

    def __call__(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, d] fp32 (T a multiple of 8), token_ids [T] int64, to experts [T, k] int64 and weights [T, k]."""
        scores = sqrt_softplus(self._gate(x))
        if self._table is not None:
            experts = self._table[token_ids]
        elif self._bias is not None:
            experts = top_experts(scores + self._bias, self._chosen)
        else:
            raise ValueError("a router has either a hash table or a bias")
        weights = scores.gather(1, experts)
        weights.div_(weights.sum(1, keepdim=True).add_(WEIGHT_SUM_EPS)).mul_(self._factor)
        return experts, weights
