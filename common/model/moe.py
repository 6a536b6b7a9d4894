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
from common.model.panels import LEAST_PANEL, cut, dividing_panel, lone_panel, product
from common.model.routing import Router
from common.model.weights import Dense, WeightReader, padded_rows

MAX_WIDE_EXPERTS = 16


def swiglu_(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), written into `gate`; no limit where None."""
    if limit is not None:
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit)
    return silu_(gate).mul_(up)


class PackedExperts:
    """All experts of a layer in two panelled matrices.

    Inner widths are padded with zeros to a multiple of 8: such channels add nothing.
    A shared expert that is s times as wide as a routed one counts as s experts of weight one behind the routed
    ones: with n = E + s, gates and ups lie as [n, 2, I] columns, downs as [n I] rows.
    """

    def __init__(self, reader: WeightReader, prefix: str, config: ModelConfig) -> None:
        d, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self._width = d
        self._inner = -(-2 * inner // LEAST_PANEL) * LEAST_PANEL // 2
        self._routed = count
        self._total = count + config.shared_experts
        self._dtype = reader.compute_dtype
        names = [(f"{prefix}.experts.{index}", inner) for index in range(count)]
        names.append((f"{prefix}.shared_experts", inner * config.shared_experts))
        both: list[Tensor] = []
        downs: list[Tensor] = []
        for name, width in names:
            gate = reader.matrix(f"{name}.w1.weight", width, d).view(-1, 1, inner, d)
            up = reader.matrix(f"{name}.w3.weight", width, d).view(-1, 1, inner, d)
            down = reader.matrix(f"{name}.w2.weight", d, width).view(d, -1, inner)
            missing = self._inner - inner
            both.append(F.pad(torch.cat((gate, up), 1), (0, 0, 0, missing)).view(-1, d))
            downs.append(F.pad(down, (0, missing)).view(d, -1))
        panel = dividing_panel(2 * self._inner)
        self._panels_per_expert = 2 * self._inner // panel
        self._both = cut(torch.cat(both), panel)
        self._downs = cut(torch.cat(downs, 1), lone_panel(d))

    def all(self, x: Tensor, shares: Tensor, limit: float, shared_limit: float | None) -> Tensor:
        """Every expert over x [T, d]; shares [T, E] fp32 are the routed experts' weights; [T, d] fp32."""
        rows = x.shape[0]
        both = product(x, self._both).float().view(rows, self._total, 2, self._inner)
        gate, up = both[:, :, 0], both[:, :, 1]
        if shared_limit == limit:
            hidden = swiglu_(gate.contiguous(), up, limit)
        else:
            hidden = gate.contiguous()
            swiglu_(hidden[:, : self._routed], up[:, : self._routed], limit)
            swiglu_(hidden[:, self._routed :], up[:, self._routed :], shared_limit)
        hidden[:, : self._routed].mul_(shares.unsqueeze(-1))
        return product(hidden.view(rows, -1).to(self._dtype), self._downs)[:, : self._width].float()

    def one(self, x: Tensor, index: int, limit: float | None) -> Tensor:
        """Rows [n, d], n a multiple of 8, through routed expert `index`, or the shared one at index E."""
        last = self._total if index == self._routed else index + 1
        panels = self._both[index * self._panels_per_expert : last * self._panels_per_expert]
        both = product(x, panels).float().view(x.shape[0], last - index, 2, self._inner)
        hidden = swiglu_(both[:, :, 0].contiguous(), both[:, :, 1], limit).view(x.shape[0], -1)
        downs = self._downs[:, index * self._inner : last * self._inner]
        return product(hidden.to(self._dtype), downs)[:, : self._width].float()


class StoredExperts:
    """Experts kept as the checkpoint has them; each is rebuilt when it is used."""

    def __init__(self, reader: WeightReader, prefix: str, config: ModelConfig) -> None:
        d, inner = config.hidden_size, config.moe_intermediate_size
        self._experts: list[tuple[Dense, Dense]] = []
        for index in range(config.num_experts + 1):
            shared = index == config.num_experts
            name = f"{prefix}.shared_experts" if shared else f"{prefix}.experts.{index}"
            width = inner * config.shared_experts if shared else inner
            both = reader.dense((f"{name}.w1.weight", width, d), (f"{name}.w3.weight", width, d))
            self._experts.append((both, reader.dense((f"{name}.w2.weight", d, width))))

    def one(self, x: Tensor, index: int, limit: float | None) -> Tensor:
        """As PackedExperts.one."""
        into, out = self._experts[index]
        gate, up = into(x).chunk(2, -1)
        return out(swiglu_(gate.contiguous(), up, limit))


class Experts:
    """One layer's FFN; `prefix` is e.g. "layers.3.ffn"."""

    def __init__(self, reader: WeightReader, prefix: str, config: ModelConfig, *, hash_routed: bool) -> None:
        self._count = config.num_experts
        self._chosen = config.experts_per_token
        self._limit = config.swiglu_limit
        self._shared_limit = config.swiglu_limit if config.clamp_shared_expert else None
        self._dtype = reader.compute_dtype
        self._router = Router(reader, f"{prefix}.gate", config, hash_routed=hash_routed)
        kind = PackedExperts if reader.keeps_dense else StoredExperts
        self._experts = kind(reader, prefix, config)

    def __call__(self, x: Tensor, token_ids: Tensor, *, decoding: bool) -> Tensor:
        """x [T, d] fp32 (T a multiple of 8), token_ids [T] int64, to [T, d] fp32."""
        experts, weights = self._router(x, token_ids)
        x = x.to(self._dtype)
        if decoding and self._count <= MAX_WIDE_EXPERTS and isinstance(self._experts, PackedExperts):
            shares = weights.new_zeros(x.shape[0], self._count).scatter_add_(1, experts, weights)
            return self._experts.all(x, shares, self._limit, self._shared_limit)
        return self._grouped(x, experts, weights)

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
                group = rows[start : start + size]
                computed[start : start + size] = self._experts.one(group, index, self._limit)
        # One slot per (token, choice), summed in the order of the choices: what a token gets must not depend on
        # where the others' rows lie.
        slots = torch.empty_like(places)
        slots[order] = places
        chosen = computed[slots].view(x.shape[0], self._chosen, -1)
        shared = self._experts.one(x, self._count, self._shared_limit)
        return torch.baddbmm(shared.unsqueeze(1), weights.unsqueeze(1), chosen).squeeze(1)
