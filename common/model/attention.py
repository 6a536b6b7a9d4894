"""One layer's attention: projections, compressed caches, sparse attention, grouped output projection.

Every matrix that reads the layer's input is part of one product; so are the two that read the query's low-rank
form. The KV store keeps the rows: see common/model/kv_store.py for who hands what to whom.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.model.chunk_selection import ChunkSelection
from common.model.compressor import Compressor
from common.model.config import ModelConfig
from common.model.indexer import decode_selection
from common.model.kv_store import CacheKind
from common.model.norms import RmsNorm, inverse_rms
from common.model.rope import Rotation, rotate_
from common.model.sparse_attention import attend, attend_chunk
from common.model.steps import DecodeStep, FixedStep, PrefillStep, Segment
from common.model.weights import Dense, GroupedOutput, WeightReader


@dataclass(frozen=True)
class Projected:
    """What the projections of T rows give; raw rows and indexer parts only where the layer has them."""

    queries: Tensor
    """[T, H, D], normalised, rotated and scaled by 1/sqrt(D)."""
    window_rows: Tensor
    """[T, D]"""
    raw_rows: Tensor | None
    """[T, 4 D] for ratio 4, [T, 2 D] for ratio 128: values and gates of the compressor."""
    raw_index_rows: Tensor | None
    """[T, 4 Di]"""
    low_rank: Tensor
    """[T, q_lora_rank], what index queries are made of."""
    head_weights: Tensor
    """[T, Hi] of the indexer, unscaled; no columns where the layer has none."""
    rotation: Rotation


class Attention:
    """Attention of layer `layer`."""

    def __init__(self, reader: WeightReader, layer: int, config: ModelConfig) -> None:
        prefix = f"layers.{layer}.attn"
        d, head, rank = config.hidden_size, config.head_dim, config.q_lora_rank
        self._layer = layer
        self._ratio = config.compress_ratios[layer]
        self._heads, self._head_dim = config.num_heads, head
        self._index_heads, self._index_dim = config.index_heads, config.index_head_dim
        self._topk = config.index_topk
        self._window = config.sliding_window
        self._eps = config.rms_norm_eps
        self._query_scale = torch.tensor([head**-0.5], device=reader.device)
        self._eps_tensor = torch.tensor([self._eps], device=reader.device)
        self._groups, self._group_rank = config.o_groups, config.o_lora_rank

        from_input = [(f"{prefix}.wq_a.weight", rank, d), (f"{prefix}.wkv.weight", head, d)]
        self._compressor: Compressor | None = None
        self._index_compressor: Compressor | None = None
        self._from_query_index: Dense | None = None
        halves = 2 if self._ratio == 4 else 1
        if self._ratio:
            self._compressor = self._read_compressor(reader, f"{prefix}.compressor", halves * head, head)
            from_input += _compressor_matrices(f"{prefix}.compressor", halves * head, d)
        if self._ratio == 4:
            indexer, width = f"{prefix}.indexer", self._index_dim
            self._index_compressor = self._read_compressor(reader, f"{indexer}.compressor", 2 * width, width)
            from_input += _compressor_matrices(f"{indexer}.compressor", 2 * width, d)
            from_input.append((f"{indexer}.weights_proj.weight", self._index_heads, d))
            self._from_query_index = reader.dense((f"{indexer}.wq_b.weight", self._index_heads * width, rank))
        self._split_input = [rows for _, rows, _ in from_input]
        self._from_input = reader.dense(*from_input)
        self._from_query = reader.dense((f"{prefix}.wq_b.weight", self._heads * head, rank))
        self._q_norm = RmsNorm(reader.vector(f"{prefix}.q_norm.weight", rank), config.rms_norm_eps)
        self._kv_norm = RmsNorm(reader.vector(f"{prefix}.kv_norm.weight", head), config.rms_norm_eps)
        self._sinks = reader.vector(f"{prefix}.attn_sink", self._heads)
        group_width = self._heads * head // self._groups
        self._grouped_output = GroupedOutput(
            reader, f"{prefix}.wo_a.weight", self._groups, self._group_rank, group_width
        )
        self._wo_b = reader.dense((f"{prefix}.wo_b.weight", d, self._groups * self._group_rank))

    def _read_compressor(self, reader: WeightReader, prefix: str, columns: int, width: int) -> Compressor:
        ape = reader.vector(f"{prefix}.ape", self._ratio, columns)
        norm = reader.vector(f"{prefix}.norm.weight", width)
        return Compressor(self._ratio, width, ape, norm, self._eps)

    def prefill(self, x: Tensor, step: PrefillStep) -> Tensor:
        """x [rows, d] packed chunks, to [rows, d]; the store of every segment is extended."""
        projected = self._project(x, step.rotations[self._ratio], step.phases.get(self._ratio))
        output = torch.empty_like(projected.queries)
        output[step.segments[-1].stop :] = 0.0
        for segment in step.segments:
            self._prefill_segment(projected, segment, output[segment.start : segment.stop])
        return self._project_output(output, step.rotations[self._ratio])

    def _prefill_segment(self, projected: Projected, segment: Segment, output: Tensor) -> None:
        kv, layer, length = segment.kv, self._layer, segment.length
        rows = slice(segment.start, segment.stop)
        window = kv.extend_window(layer, projected.window_rows[rows])
        entries: Tensor | None = None
        selection: ChunkSelection | None = None
        if self._compressor is not None and projected.raw_rows is not None:
            kind = CacheKind.C4 if self._ratio == 4 else CacheKind.C128
            turn = segment.entry_turns[self._ratio]
            state = kv.extend_state(layer, kind, projected.raw_rows[rows])
            entries = kv.extend_entries(layer, kind, self._compressor.prefill(state, length, segment.tokens, turn))
            if self._index_compressor is not None and projected.raw_index_rows is not None:
                state = kv.extend_state(layer, CacheKind.INDEX, projected.raw_index_rows[rows])
                born = self._index_compressor.prefill(state, length, segment.tokens, turn)
                keys = kv.extend_entries(layer, CacheKind.INDEX, born)
                if keys.shape[0] > self._topk:
                    selection = self._select(projected, segment, keys)
        attend_chunk(
            projected.queries[rows],
            window,
            entries,
            self._ratio,
            length,
            self._window,
            self._sinks,
            selection,
            output,
        )

    def _select(self, projected: Projected, segment: Segment, keys: Tensor) -> ChunkSelection:
        queries, weights = self._index_queries(projected)
        rows = slice(segment.start, segment.stop)
        if keys.shape[0] < segment.tokens * self._index_heads:
            # The rotation is symmetric: q R . k = q . k R, and there are fewer keys than queries to rotate.
            keys, chosen = segment.kv.rotate_index_queries(keys), queries[rows]
        else:
            chosen = segment.kv.rotate_index_queries(queries[rows])
        return ChunkSelection(chosen, weights[rows], keys, self._topk, segment.length)

    def decode(self, x: Tensor, step: DecodeStep) -> Tensor:
        """x [rows, d], of which the first B are real, to [rows, d]; the store is extended by one token each."""
        projected = self._project(x, step.rotations[self._ratio], step.phases.get(self._ratio))
        batch = step.batch
        window = step.kv.extend_window(self._layer, projected.window_rows[:batch])
        output = torch.zeros_like(projected.queries)
        queries = projected.queries[:batch]
        if self._ratio == 0:
            output[:batch] = attend(queries, window, None, step.window_bias, None, self._sinks)
        elif self._ratio == 4:
            chosen = self._extend_and_select(projected, step)
            rows = step.kv.gather_c4(self._layer, chosen)
            bias = torch.zeros(batch, 1, self._topk, device=x.device)
            bias.masked_fill_((chosen < 0).unsqueeze(1), -torch.inf)
            output[:batch] = attend(queries, window, rows, step.window_bias, bias, self._sinks)
        else:
            self._extend(CacheKind.C128, self._compressor, projected.raw_rows, step)
            self._attend_c128(queries, window, step, output)
        return self._project_output(output, step.rotations[self._ratio])

    def decode_fixed(self, x: Tensor, step: FixedStep) -> Tensor:
        """x [B, d] to [B, d]: as `decode`, in fixed shapes; padding is computed along."""
        ratio, kv, layer = self._ratio, step.kv, self._layer
        projected = self._project(x, step.rotations[ratio], step.phases.get(ratio))
        kv.extend_window(layer, projected.window_rows)
        selected: Tensor | None = None
        if self._compressor is not None and projected.raw_rows is not None:
            kind, turn = CacheKind.C4 if ratio == 4 else CacheKind.C128, step.entry_turns[ratio]
            state = kv.extend_state(layer, kind, projected.raw_rows)
            kv.append_entries(layer, kind, self._compressor.decode(state, turn))
            if self._index_compressor is not None and projected.raw_index_rows is not None:
                state = kv.extend_state(layer, CacheKind.INDEX, projected.raw_index_rows)
                kv.append_entries(layer, CacheKind.INDEX, self._index_compressor.decode(state, turn))
                selected = kv.select(layer, *self._index_queries(projected))
        attended = kv.attend(layer, projected.queries, self._sinks, selected)
        return self._project_output(attended, projected.rotation)

    def _extend(
        self, kind: CacheKind, compressor: Compressor | None, raw_rows: Tensor | None, step: DecodeStep
    ) -> None:
        """Hands this token's raw rows to the store, and the entries of the windows that it closes."""
        if compressor is None or raw_rows is None:
            raise ValueError(f"layer {self._layer} of ratio {self._ratio} has no {kind.value} compressor")
        closing = step.closing[self._ratio]
        state = step.kv.extend_state(self._layer, kind, raw_rows[: step.batch], closing.rows)
        if closing.rows.shape[0]:
            step.kv.append_entries(self._layer, kind, closing.rows, compressor.decode(state, closing.turn))

    def _extend_and_select(self, projected: Projected, step: DecodeStep) -> Tensor:
        """C4 entries each sequence reads: [B, topk], -1 = none."""
        self._extend(CacheKind.C4, self._compressor, projected.raw_rows, step)
        self._extend(CacheKind.INDEX, self._index_compressor, projected.raw_index_rows, step)
        if step.everything is None:
            raise ValueError(f"layer {self._layer} of ratio {self._ratio} decodes without C4 entry counts")
        if not step.crowded:
            return step.everything
        queries, weights = self._index_queries(projected)
        queries = step.kv.rotate_index_queries(queries[: step.batch])
        keys = step.kv.index_keys(self._layer)
        return decode_selection(queries, weights[: step.batch], keys, step.entry_counts[4], step.everything)

    def _attend_c128(self, queries: Tensor, window: Tensor, step: DecodeStep, output: Tensor) -> None:
        """Sequences whose padded entry counts agree go together; a batched product treats each as if alone."""
        entries = step.kv.c128_entries(self._layer)
        groups: dict[int, list[int]] = {}
        for b, rows in enumerate(entries):
            groups.setdefault(rows.shape[0], []).append(b)
        for padded, members in sorted(groups.items()):
            index = torch.tensor(members, device=queries.device)
            bias = None if step.window_bias is None else step.window_bias[index]
            stacked: Tensor | None = None
            entry_bias: Tensor | None = None
            if padded:
                stacked = torch.stack([entries[b] for b in members])
                counts = step.entry_counts[128][index]
                hidden = torch.arange(padded, device=queries.device) >= counts.unsqueeze(1)
                entry_bias = torch.zeros(len(members), 1, padded, device=queries.device)
                entry_bias.masked_fill_(hidden.unsqueeze(1), -torch.inf)
            output[index] = attend(queries[index], window[index], stacked, bias, entry_bias, self._sinks)

    def _project(self, x: Tensor, rotation: Rotation, phase: Tensor | None) -> Projected:
        from_input = self._from_input(x)
        parts = from_input.split(self._split_input, -1)
        low_rank = self._q_norm(parts[0])
        window_rows = rotate_(self._kv_norm(parts[1]), rotation.forward)
        raw_queries = self._from_query(low_rank).view(-1, self._heads, self._head_dim)
        scale = inverse_rms(raw_queries, self._eps_tensor).mul_(self._query_scale)
        queries = rotate_(raw_queries.mul_(scale), rotation.forward)
        raw_rows = raw_index_rows = None
        if self._compressor is not None and phase is not None:
            raw_rows = self._compressor.add_position_bias_(_joined(from_input, parts[2], parts[3]), phase)
        if self._index_compressor is not None and phase is not None:
            raw_index_rows = _joined(from_input, parts[4], parts[5])
            self._index_compressor.add_position_bias_(raw_index_rows, phase)
        head_weights = parts[6] if self._ratio == 4 else low_rank[:, :0]
        return Projected(queries, window_rows, raw_rows, raw_index_rows, low_rank, head_weights, rotation)

    def _index_queries(self, projected: Projected) -> tuple[Tensor, Tensor]:
        """The indexer's queries [T, Hi, Di], rotated by position but not yet in the basis of the keys, and its head
        weights [T, Hi] scaled by 1/sqrt(Hi Di). Only asked for once some sequence has more entries than it may read."""
        if self._from_query_index is None:
            raise ValueError(f"layer {self._layer} of ratio {self._ratio} has no indexer")
        queries = self._from_query_index(projected.low_rank).view(-1, self._index_heads, self._index_dim)
        rotate_(queries, projected.rotation.forward)
        return queries, projected.head_weights * (self._index_heads * self._index_dim) ** -0.5

    def _project_output(self, attended: Tensor, rotation: Rotation) -> Tensor:
        """[rows, H, D] back to [rows, d]: inverse rotation at the query, group by group, then joined."""
        return self._wo_b(self._grouped_output(rotate_(attended, rotation.backward)))


def _joined(whole: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Two neighbouring column slices of `whole` as one view."""
    start = left.storage_offset() - whole.storage_offset()
    return whole[:, start : start + left.shape[1] + right.shape[1]]


def _compressor_matrices(prefix: str, rows: int, columns: int) -> list[tuple[str, int, int]]:
    return [(f"{prefix}.wkv.weight", rows, columns), (f"{prefix}.wgate.weight", rows, columns)]
