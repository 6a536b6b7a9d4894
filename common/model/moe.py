"""Mixture of experts: routed SwiGLU experts and one shared expert.

    y = sum over the token's experts of w_e expert_e(x)  +  shared(x)
    expert(x) = W2 (silu(min(W1 x, limit)) * clamp(W3 x, -limit, limit))

Two ways to the same sum. Decoding with few experts: every expert over every token as one wide product, the
weights (zero where not chosen) applied before W2; a batch reads nearly all experts anyway, and a loop's launches
cost more than the extra arithmetic. Otherwise rows are grouped by expert, each group padded to a multiple of 8.
The choice depends on the model and on prefill or decode only, never on the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.model.activations import silu_
from common.model.config import ModelConfig
from common.model.routing import Router
from common.model.weights import Dense, WeightReader, padded_rows

MAX_WIDE_EXPERTS = 16


def swiglu_(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), written into `gate`; no limit where None."""
    if limit is not None:
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit)
    return silu_(gate).mul_(up)


class WideExperts:
    """All experts of a layer side by side, the shared one last: gates and ups [E I + Is, d], downs [d, E I + Is]."""

    def __init__(self, gates: Dense, ups: Dense, downs: Tensor, experts: int, inner: int) -> None:
        self._both = torch.cat((gates.matrix(), ups.matrix()))
        self._downs = downs
        self._experts = experts
        self._inner = inner
        self._width = downs.shape[1]

    def expert(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up and down matrices of a routed expert, or of the shared one (index E); views."""
        start = index * self._inner
        stop = self._width if index == self._experts else start + self._inner
        return self._both[start:stop], self._both[self._width + start : self._width + stop], self._downs[:, start:stop]

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, limit: float, shared_limit: float | None) -> Tensor:
        """x [T, d] in the compute dtype, experts and weights [T, k], to [T, d] fp32."""
        rows, routed = x.shape[0], self._experts * self._inner
        both = F.linear(x, self._both).float()
        gate, up = both[:, : self._width], both[:, self._width :]
        if shared_limit == limit:
            hidden = swiglu_(gate, up, limit)
        else:
            hidden = gate
            swiglu_(gate[:, :routed], up[:, :routed], limit)
            swiglu_(gate[:, routed:], up[:, routed:], shared_limit)
        shares = x.new_zeros(rows, self._experts, dtype=torch.float32).scatter_add_(1, experts, weights)
        hidden[:, :routed].unflatten(1, (self._experts, self._inner)).mul_(shares.unsqueeze(-1))
        return F.linear(hidden.to(x.dtype), self._downs).float()


class Experts:
    """One layer's FFN; `prefix` is e.g. "layers.3.ffn"."""

    def __init__(self, reader: WeightReader, prefix: str, config: ModelConfig, *, hash_routed: bool) -> None:
        d, count, inner = config.hidden_size, config.num_experts, config.moe_intermediate_size
        self._count = count
        self._chosen = config.experts_per_token
        self._limit = config.swiglu_limit
        self._shared_limit = config.swiglu_limit if config.clamp_shared_expert else None
        self._dtype = reader.compute_dtype
        self._router = Router(reader, f"{prefix}.gate", config, hash_routed=hash_routed)
        widths = [inner] * count + [inner * config.shared_experts]
        names = [f"{prefix}.experts.{index}" for index in range(count)] + [f"{prefix}.shared_experts"]
        named = list(zip(names, widths, strict=True))
        self._wide: WideExperts | None = None
        self._parts: list[tuple[Dense, Dense, Dense]] = []
        if count <= MAX_WIDE_EXPERTS and reader.keeps_dense:
            gates = reader.dense(*[(f"{name}.w1.weight", width, d) for name, width in named])
            ups = reader.dense(*[(f"{name}.w3.weight", width, d) for name, width in named])
            downs = [reader.dense((f"{name}.w2.weight", d, width)).matrix() for name, width in named]
            self._wide = WideExperts(gates, ups, torch.cat(downs, 1), count, inner)
        else:
            for name, width in named:
                gate = reader.dense((f"{name}.w1.weight", width, d))
                up = reader.dense((f"{name}.w3.weight", width, d))
                self._parts.append((gate, up, reader.dense((f"{name}.w2.weight", d, width))))

    def __call__(self, x: Tensor, token_ids: Tensor, *, decoding: bool) -> Tensor:
        """x [T, d] fp32 (T a multiple of 8), token_ids [T] int64, to [T, d] fp32."""
        experts, weights = self._router(x, token_ids)
        if decoding and self._wide is not None:
            return self._wide(x.to(self._dtype), experts, weights, self._limit, self._shared_limit)
        return self._grouped(x.to(self._dtype), experts, weights)

    def _matrices(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if self._wide is not None:
            return self._wide.expert(index)
        gate, up, down = self._parts[index]
        return gate.matrix(), up.matrix(), down.matrix()

    def _expert(self, x: Tensor, index: int, limit: float | None) -> Tensor:
        """Rows [n, d], n a multiple of 8, through one expert: [n, d] fp32."""
        gate, up, down = self._matrices(index)
        hidden = swiglu_(F.linear(x, gate).float(), F.linear(x, up).float(), limit)
        return F.linear(hidden.to(self._dtype), down).float()

    def _grouped(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        flat = experts.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self._count)
        sizes = [padded_rows(rows) for rows in counts.tolist()]
        starts = [sum(sizes[:index]) for index in range(self._count)]
        # Where the j-th assignment, by expert, lies among the padded groups.
        shift = torch.tensor(starts, device=x.device) - (counts.cumsum(0) - counts)
        places = torch.arange(flat.shape[0], device=x.device) + shift[flat[order]]
        tokens = torch.zeros(sum(sizes), dtype=torch.int64, device=x.device)
        tokens[places] = order.div(self._chosen, rounding_mode="floor")
        rows = x[tokens]
        computed = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            if size:
                computed[start : start + size] = self._expert(rows[start : start + size], index, self._limit)
        # One slot per (token, choice), summed in the order of the choices: what a token gets must not depend on
        # where the others' rows lie.
        slots = torch.empty_like(places)
        slots[order] = places
        chosen = computed[slots].view(x.shape[0], self._chosen, -1)
        shared = self._expert(x, self._count, self._shared_limit)
        return torch.baddbmm(shared.unsqueeze(1), weights.unsqueeze(1), chosen).squeeze(1)
