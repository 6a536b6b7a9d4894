"""DeepSeek-V4 in a dense, differentiable form, for training: whole sequences, no KV store, parameters by native name.

The equations are those of common/model (the exported checkpoint gives the same logits there and in transformers).
This form exists since training wants other things than serving: large batches of equal lengths, gradients through
every window at once, fake quantisation of weights and KV with straight-through gradients, and teacher signals for
the indexer, which gets no gradient through its top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.model.config import ModelConfig
from common.model.rope import plain_frequencies, yarn_frequencies
from common.model.weight_names import expected_weights
from tools.nano.fake_quantise import fake_fp8_blocks, fake_index_keys, fake_rows


@dataclass
class Options:
    """topk: entries a query attends to, 0 = all (dense); quantise_kv, quantise_weights: as they are served;
    drop_c4: C4 entries are hidden (the other layers must do without them); checkpointed: recompute in backward."""

    topk: int = 0
    quantise_kv: bool = False
    quantise_weights: bool = False
    drop_c4: bool = False
    checkpointed: bool = False


class DenseModel(nn.Module):
    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterDict()
        self.tables: dict[str, Tensor] = {}
        for name, spec in expected_weights(config).items():
            if spec.stored_as == "int64":
                scores = torch.rand(spec.shape[0], config.num_experts, generator=generator)
                self.tables[name] = scores.argsort(dim=1)[:, : spec.shape[1]].contiguous()
                continue
            self.weights[_key(name)] = nn.Parameter(_initial(name, spec.shape, generator))
        self.quantised = {_key(n) for n, s in expected_weights(config).items() if s.stored_as in ("fp8", "expert")}
        self.previous = nn.Linear(config.hidden_size, 4 * config.vocab_size, bias=False)
        self.register_buffer("plain", plain_frequencies(config.rope_theta, config.rope_dim), persistent=False)
        compressed = yarn_frequencies(
            config.compress_rope_theta,
            config.rope_dim,
            config.rope_factor,
            config.rope_beta_fast,
            config.rope_beta_slow,
            config.rope_original_positions,
        )
        self.register_buffer("compressed", compressed, persistent=False)
        self.options = Options()

    def w(self, name: str) -> Tensor:
        key = _key(name)
        weight = self.weights[key]
        if self.options.quantise_weights and key in self.quantised:
            return fake_fp8_blocks(weight)
        return weight

    def forward(self, tokens: Tensor, asked: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [B, T] to final hidden [B, T, d] (see `logits`), the indexer's loss over the positions `asked` [B, P],
        and the hidden rows behind the first block, for the auxiliary head."""
        config = self.config
        x = F.embedding(tokens, self.w("embed.weight")).unsqueeze(2).expand(-1, -1, config.hc_mult, -1)
        index_loss = x.new_zeros(())
        early = x
        for layer in range(config.num_layers):
            if self.options.checkpointed:
                x, loss = checkpoint(self._layer, layer, x, tokens, asked, use_reentrant=False)
            else:
                x, loss = self._layer(layer, x, tokens, asked)
            index_loss = index_loss + loss
            if layer == 0:
                early = _rms(x.mean(2), config.rms_norm_eps)
        z = _rms(x.flatten(2), config.rms_norm_eps) @ self.w("hc_head_fn").T
        weights = torch.sigmoid(z * self.w("hc_head_scale") + self.w("hc_head_base")) + config.hc_eps
        hidden = (weights.unsqueeze(-1) * x).sum(2)
        return _rms(hidden, config.rms_norm_eps) * self.w("norm.weight"), index_loss, early

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.w("head.weight")).float()

    def _layer(self, layer: int, x: Tensor, tokens: Tensor, asked: Tensor | None) -> tuple[Tensor, Tensor]:
        prefix = f"layers.{layer}."
        joined, post, mix = self._mixing(prefix + "hc_attn", x)
        made, loss = self._attention(layer, joined, asked)
        x = _spread(x, made, post, mix)
        joined, post, mix = self._mixing(prefix + "hc_ffn", x)
        return _spread(x, self._ffn(layer, joined, tokens), post, mix), loss

    def _mixing(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config, n = self.config, self.config.hc_mult
        z = _rms(x.flatten(2), config.rms_norm_eps) @ self.w(f"{name}_fn").T
        joined, post, mix = _hyper(z.float(), self.w(f"{name}_scale"), self.w(f"{name}_base"), x, n,
                                   config.hc_sinkhorn_iters, config.hc_eps)  # fmt: skip
        layer_norm = name.replace("hc_attn", "attn_norm").replace("hc_ffn", "ffn_norm")
        return _rms(joined, config.rms_norm_eps) * self.w(f"{layer_norm}.weight"), post, mix

    def _ffn(self, layer: int, x: Tensor, tokens: Tensor) -> Tensor:
        config, prefix = self.config, f"layers.{layer}.ffn."
        affinity = F.softplus(F.linear(x, self.w(prefix + "gate.weight")).float()).clamp(min=1e-12).sqrt()
        if layer < config.num_hash_layers:
            table = self.tables[prefix + "gate.tid2eid"].to(x.device)
            chosen = table[tokens]
        else:
            chosen = (affinity + self.w(prefix + "gate.bias")).topk(config.experts_per_token, dim=-1).indices
        weights = affinity.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
        share = torch.zeros_like(affinity).scatter(-1, chosen, weights)
        names = [f"{prefix}experts.{e}" for e in range(config.num_experts)]
        gate = F.linear(x, torch.cat([self.w(f"{n}.w1.weight") for n in names]))
        up = F.linear(x, torch.cat([self.w(f"{n}.w3.weight") for n in names]))
        hidden = _swiglu(gate, up, config.swiglu_limit).unflatten(-1, (config.num_experts, -1))
        hidden = (hidden * share.unsqueeze(-1).to(hidden.dtype)).flatten(-2)
        routed = F.linear(hidden, torch.cat([self.w(f"{n}.w2.weight") for n in names], dim=1))
        shared = prefix + "shared_experts"
        hidden = _swiglu(F.linear(x, self.w(f"{shared}.w1.weight")), F.linear(x, self.w(f"{shared}.w3.weight")),
                         config.swiglu_limit)  # fmt: skip
        return routed + F.linear(hidden, self.w(f"{shared}.w2.weight"))

    def _attention(self, layer: int, x: Tensor, asked: Tensor | None) -> tuple[Tensor, Tensor]:
        config, prefix = self.config, f"layers.{layer}.attn."
        ratio, eps = config.compress_ratios[layer], config.rms_norm_eps
        _batch, length, _ = x.shape
        frequency = self.compressed if ratio else self.plain
        positions = torch.arange(length, device=x.device)
        latent = _rms(F.linear(x, self.w(prefix + "wq_a.weight")), eps) * self.w(prefix + "q_norm.weight")
        queries = F.linear(latent, self.w(prefix + "wq_b.weight")).unflatten(-1, (config.num_heads, config.head_dim))
        queries = _rope(_rms(queries, eps), positions, frequency)
        rows = _rms(F.linear(x, self.w(prefix + "wkv.weight")), eps) * self.w(prefix + "kv_norm.weight")
        rows = _rope(rows, positions, frequency)
        if self.options.quantise_kv:
            rows = fake_rows(rows)
        entries: Tensor | None = None
        hidden: Tensor | None = None
        loss = x.new_zeros((), dtype=torch.float32)
        if ratio and length >= ratio and not (ratio == 4 and self.options.drop_c4):
            entries = self._compress(prefix + "compressor", x, ratio, config.head_dim)
            if self.options.quantise_kv:
                entries = fake_rows(entries)
            count = entries.shape[1]
            hidden = torch.arange(count, device=x.device) >= ((positions + 1) // ratio)[:, None]
            hidden = hidden.unsqueeze(0)
            if ratio == 4:
                keys = self._compress(prefix + "indexer.compressor", x.detach(), ratio, config.index_head_dim)
                if self.options.quantise_kv:
                    keys = fake_index_keys(keys)
                if self.options.topk and count > self.options.topk:
                    hidden = hidden | ~self._selected(prefix, latent, x, keys, positions, hidden)
                if asked is not None:
                    loss = self._index_loss(prefix, latent, x, keys, entries, queries, rows, positions, asked)
        attended = _attend(queries, rows, entries, hidden, self.w(prefix + "attn_sink"), config.sliding_window)
        attended = _rope(attended, positions, frequency, inverse=True)
        groups = attended.flatten(-2).unflatten(-1, (config.o_groups, -1))
        low = self.w(prefix + "wo_a.weight").unflatten(0, (config.o_groups, -1))
        low = torch.einsum("btgi,goi->btgo", groups, low.to(groups.dtype)).flatten(-2)
        return F.linear(low, self.w(prefix + "wo_b.weight")), loss

    def _compress(self, name: str, x: Tensor, ratio: int, width: int) -> Tensor:
        _batch, length, _ = x.shape
        count = length // ratio
        x = x[:, : count * ratio]
        values = F.linear(x, self.w(f"{name}.wkv.weight")).float().unflatten(1, (count, ratio))
        gates = F.linear(x, self.w(f"{name}.wgate.weight")).float().unflatten(1, (count, ratio))
        gates = gates + self.w(f"{name}.ape")
        if ratio == 4:
            values = torch.cat([F.pad(values[:, :-1, :, :width], (0, 0, 0, 0, 1, 0)), values[..., width:]], dim=2)
            gates = torch.cat(
                [F.pad(gates[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=float("-inf")), gates[..., width:]], dim=2
            )
        pooled = (gates.softmax(2) * values).sum(2)
        pooled = _rms(pooled, self.config.rms_norm_eps) * self.w(f"{name}.norm.weight")
        return _rope(pooled, torch.arange(count, device=x.device) * ratio, self.compressed)

    def _index_scores(self, prefix: str, latent: Tensor, x: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """latent and x [B, P, ...] at `positions` [P] or [B, P], keys [B, c, width], to scores [B, P, c]."""
        config = self.config
        queries = F.linear(latent, self.w(prefix + "indexer.wq_b.weight"))
        queries = _rope(queries.unflatten(-1, (config.index_heads, config.index_head_dim)), positions, self.compressed)
        weights = F.linear(x, self.w(prefix + "indexer.weights_proj.weight"))
        weights = weights * (config.index_heads * config.index_head_dim) ** -0.5
        products = torch.einsum("bphd,bcd->bphc", queries.to(keys.dtype), keys).relu()
        return torch.einsum("bph,bphc->bpc", weights.to(products.dtype), products).float()

    @torch.no_grad()
    def _selected(
        self, prefix: str, latent: Tensor, x: Tensor, keys: Tensor, positions: Tensor, hidden: Tensor
    ) -> Tensor:
        """Mask [B, T, c] of the top-k entries of each query, computed in blocks of queries."""
        parts: list[Tensor] = []
        for low in range(0, x.shape[1], 1024):
            high = min(low + 1024, x.shape[1])
            score = self._index_scores(prefix, latent[:, low:high], x[:, low:high], keys, positions[low:high])
            score = score.masked_fill(hidden[:, low:high], float("-inf"))
            best = score.topk(self.options.topk, dim=-1).indices
            parts.append(torch.zeros_like(score, dtype=torch.bool).scatter_(2, best, True))
        return torch.cat(parts, dim=1)

    def _index_loss(
        self, prefix: str, latent: Tensor, x: Tensor, keys: Tensor, entries: Tensor, queries: Tensor, rows: Tensor,
        positions: Tensor, asked: Tensor,
    ) -> Tensor:  # fmt: skip
        """Cross-entropy between the indexer's distribution and where attention really goes, at the asked positions:
        head-summed mass on the entries (detached), weighted by that mass."""
        config = self.config

        def at(t: Tensor) -> Tensor:
            index = asked.view(*asked.shape, *([1] * (t.dim() - 2))).expand(-1, -1, *t.shape[2:])
            return t.gather(1, index)

        count = entries.shape[1]
        hidden = torch.arange(count, device=x.device) >= ((asked + 1) // 4).unsqueeze(-1)
        with torch.no_grad():
            q = at(queries)
            logits = torch.einsum("bphd,bcd->bphc", q, entries.to(q.dtype)).float() * config.head_dim**-0.5
            logits = logits.masked_fill(hidden.unsqueeze(2), float("-inf"))
            back = asked.unsqueeze(-1) - torch.arange(config.sliding_window, device=x.device)
            batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
            window = rows[batch, back.clamp(min=0)]
            near = torch.einsum("bphd,bpwd->bphw", q, window.to(q.dtype)).float() * config.head_dim**-0.5
            near = near.masked_fill((back < 0).unsqueeze(2), float("-inf"))
            sink = self.w(prefix + "attn_sink").float().view(1, 1, -1, 1).expand(*logits.shape[:3], 1)
            mass = torch.cat([logits, near, sink], -1).softmax(-1)[..., :count].sum(2)
        score = self._index_scores(prefix, at(latent).detach(), at(x).detach(), keys, asked)
        logprob = score.masked_fill(hidden, float("-inf")).log_softmax(-1).clamp(min=-30)
        return -(mass * logprob.masked_fill(hidden, 0)).sum(-1).mean()


def _key(name: str) -> str:
    return name.replace(".", "/")


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("_scale"):
        return torch.full(shape, 0.1)
    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        n = int((shape[0] + 1) ** 0.5) - 1
        base = torch.zeros(shape)
        base[: 2 * n] = 0.0
        base[2 * n :] = (4.0 * torch.eye(n)).flatten()
        return base
    if name.endswith(("ape", "_base", "attn_sink", "gate.bias")):
        return torch.zeros(shape)
    noise = torch.randn(shape, generator=generator)
    if name == "embed.weight":
        return 0.5 * noise
    gain = 0.5 if name.endswith(("wo_b.weight", "w2.weight", "head.weight")) else 1.0
    return gain * noise * shape[-1] ** -0.5


def _rms(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), eps=eps)


def _swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _rope(x: Tensor, positions: Tensor, frequency: Tensor, inverse: bool = False) -> Tensor:
    """x [B, T, ..., D] at positions [T] or [B, T]."""
    angle = positions.float().unsqueeze(-1) * frequency
    if angle.dim() == 2:
        angle = angle.unsqueeze(0)
    if x.dim() == 4:
        angle = angle.unsqueeze(2)
    cos, sin = angle.cos(), angle.sin() * (-1 if inverse else 1)
    width = 2 * frequency.shape[0]
    even, odd = x[..., -width::2].float(), x[..., x.shape[-1] - width + 1 :: 2].float()
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([x[..., :-width], turned.to(x.dtype)], -1)


def _hyper(
    z: Tensor, scale: Tensor, base: Tensor, x: Tensor, n: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    pre = torch.sigmoid(z[..., :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(z[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    mix = (z[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return (pre.unsqueeze(-1) * x).sum(-2), post, mix


def _spread(x: Tensor, made: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    # Stream by stream: all products at once would be four times the streams' memory.
    spread = post.unsqueeze(-1) * made.unsqueeze(-2).float()
    for stream in range(x.shape[-2]):
        spread = torch.addcmul(spread, mix[..., stream, :].unsqueeze(-1), x[..., stream, :].unsqueeze(-2))
    return spread


def _attend(
    queries: Tensor, rows: Tensor, entries: Tensor | None, hidden: Tensor | None, sinks: Tensor, window: int
) -> Tensor:
    """queries [B, T, H, D], rows [B, T, D], entries [B, c, D], hidden [1 or B, T, c] true where not attended."""
    batch, length, heads, width = queries.shape
    pad = -length % window
    blocks = (length + pad) // window
    dtype = torch.bfloat16 if queries.is_cuda else queries.dtype
    q = F.pad(queries, (0, 0, 0, 0, 0, pad)).to(dtype).view(batch, blocks, window * heads, width)
    keys = F.pad(rows.to(dtype), (0, 0, window, pad))
    keys = torch.stack(
        [keys[:, :-window].unflatten(1, (blocks, window)), keys[:, window:].unflatten(1, (blocks, window))], 2
    )
    keys = keys.flatten(2, 3)
    near = (q @ keys.transpose(-1, -2)).view(batch, blocks, window, heads, 2 * window)
    at = torch.arange(window, device=q.device)[:, None] + window
    key = torch.arange(2 * window, device=q.device)
    first = torch.arange(blocks, device=q.device)[:, None, None] * window + key - window
    masked = (key > at) | (key <= at - window) | (first < 0)
    near = near.float().mul(width**-0.5).masked_fill(masked.unsqueeze(2), float("-inf"))
    near = near.view(batch, blocks * window, heads, 2 * window)[:, :length]
    sink = sinks.float().view(1, 1, heads, 1).expand(batch, length, heads, 1)
    parts = [near, sink]
    if entries is not None and hidden is not None:
        far = torch.einsum("bthd,bcd->bthc", queries.to(dtype), entries.to(dtype)).float() * width**-0.5
        parts.append(far.masked_fill(hidden.unsqueeze(2), float("-inf")))
    weights = torch.cat(parts, -1).softmax(-1).to(dtype)
    own = F.pad(weights[..., : 2 * window], (0, 0, 0, 0, 0, pad)).view(batch, blocks, window * heads, 2 * window)
    out = (own @ keys).view(batch, blocks * window, heads, width)[:, :length]
    if entries is not None:
        out = out + torch.einsum("bthc,bcd->bthd", weights[..., 2 * window + 1 :], entries.to(dtype))
    return out
