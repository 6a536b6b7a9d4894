"""Mixture of experts: routed SwiGLU experts weighted by sqrt(softplus) scores, and one shared expert.

    a_e = sqrt(softplus(x . gate_e));  T = the k largest a_e + bias_e (learned) or tid2eid[token] (hash)
    y   = sum over T of gamma a_e / (sum over T of a + 1e-20) expert_e(x)  +  shared(x)
    expert(x) = W2 (silu(min(W1 x, limit)) * clamp(W3 x, -limit, limit))

Two ways to the same sum. Few tokens and few experts: every expert over every token as one wide product, the
weights (zero where not chosen) applied before W2; all experts' weights are read anyway, and the loop's launches
cost more than the extra arithmetic. Otherwise rows are grouped per expert, each group padded to a multiple of 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.model.activations import silu_, sqrt_softplus
from common.model.config import ModelConfig
from common.model.weights import WeightReader, padded_rows

MAX_WIDE_EXPERTS = 16
WEIGHT_SUM_EPS = 1e-20


def top_experts(scores: Tensor, count: int) -> Tensor:
    """The `count` largest of scores [T, E], ties to the lower expert: [T, count] int64."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


class Experts:
    """One layer's FFN; `prefix` is e.g. "layers.3.ffn"."""

    def __init__(self, reader: WeightReader, prefix: str, config: ModelConfig, *, hash_routed: bool) -> None:
        d, count = config.hidden_size, config.num_experts
        self._count = count
        self._chosen = config.experts_per_token
        self._factor = config.routed_scaling_factor
        self._limit = config.swiglu_limit
        self._inner = config.moe_intermediate_size
        shared_inner = config.moe_intermediate_size * config.shared_experts
        self._clamp_shared = config.clamp_shared_expert
        self._gate = reader.dense((f"{prefix}.gate.weight", count, d), dtype=torch.float32)
        self._table = torch.empty(0)
        self._bias: Tensor | None = None
        if hash_routed:
            self._table = reader.table(f"{prefix}.gate.tid2eid", config.vocab_size, self._chosen)
            if int(self._table.min()) < 0 or int(self._table.max()) >= count:
                raise ValueError(f"{prefix}.gate.tid2eid names experts outside 0 ... {count - 1}")
        else:
            self._bias = reader.vector(f"{prefix}.gate.bias", count)

        def expert(index: int, *matrices: str) -> list[tuple[str, int, int]]:
            shape = {"w1": (self._inner, d), "w3": (self._inner, d), "w2": (d, self._inner)}
            return [(f"{prefix}.experts.{index}.{name}.weight", *shape[name]) for name in matrices]

        def shared(*matrices: str) -> list[tuple[str, int, int]]:
            shape = {"w1": (shared_inner, d), "w3": (shared_inner, d), "w2": (d, shared_inner)}
            return [(f"{prefix}.shared_experts.{name}.weight", *shape[name]) for name in matrices]

        self._shared_in = reader.dense(*shared("w1", "w3"))
        self._shared_out = reader.dense(*shared("w2"))
        self._expert_in = [reader.dense(*expert(e, "w1", "w3")) for e in range(count)]
        self._expert_out = [reader.dense(*expert(e, "w2")) for e in range(count)]

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """x [T, d] fp32 (T a multiple of 8), token_ids [T] int64, to [T, d]."""
        experts, weights = self._route(x, token_ids)
        output = self._shared_out(self._activate(self._shared_in(x), clamp=self._clamp_shared))
        flat_experts = experts.flatten()
        order = torch.argsort(flat_experts, stable=True)
        counts = torch.bincount(flat_experts, minlength=self._count).tolist()
        tokens = order.div(self._chosen, rounding_mode="floor")
        row_weights = weights.flatten()[order].unsqueeze(-1)
        routed = x.new_empty(flat_experts.shape[0], x.shape[1])
        start = 0
        for index, rows in enumerate(counts):
            if rows == 0:
                continue
            group = x.new_zeros(padded_rows(rows), x.shape[1])
            torch.index_select(x, 0, tokens[start : start + rows], out=group[:rows])
            hidden = self._activate(self._expert_in[index](group), clamp=True)
            routed[start : start + rows] = self._expert_out[index](hidden)[:rows]
            start += rows
        # One slot per (token, choice), summed in the order of the choices: an atomic or grouped sum would
        # depend on the other tokens.
        slots = torch.empty_like(routed)
        slots[order] = routed.mul_(row_weights)
        return output.add_(slots.view(x.shape[0], self._chosen, -1).sum(1))

    def _route(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts [T, k] int64 and their weights [T, k]."""
        scores = sqrt_softplus(self._gate(x))
        learned = self._bias is not None
        experts = top_experts(scores + self._bias, self._chosen) if learned else self._table[token_ids]
        weights = scores.gather(1, experts)
        weights.div_(weights.sum(1, keepdim=True).add_(WEIGHT_SUM_EPS)).mul_(self._factor)
        return experts, weights

    def _activate(self, both: Tensor, *, clamp: bool) -> Tensor:
        """[rows, 2 I] (gate | up) to [rows, I]."""
        inner = both.shape[1] // 2
        gate, up = both[:, :inner], both[:, inner:]
        if clamp:
            gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return silu_(gate.contiguous()).mul_(up)
