"""A plain, unpaged KV store for tests: what each sequence has, in growing fp32 buffers.

`LocalSequence` is the prefill side, `LocalBatch` decodes several of them together. With `quantise` every row
goes through the serving quantisation once, when it arrives; the raw compressor state never does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.model.config import ModelConfig
from common.model.kv_store import CacheKind


class GrowingRows:
    """Rows [n, width] fp32 that can be appended to in amortised constant time."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, 0)
        self.count = 0

    def append(self, rows: Tensor) -> None:
        end = self.count + rows.shape[0]
        if end > self._buffer.shape[0]:
            # Zero behind the last row: callers read whole multiples of 64.
            grown = torch.zeros(max(64, -(-2 * end // 64) * 64), rows.shape[1])
            if self.count:
                grown[: self.count] = self._buffer[: self.count]
            self._buffer = grown
        self._buffer[self.count : end] = rows
        self.count = end

    def rows(self, start: int, stop: int) -> Tensor:
        return self._buffer[start:stop]

    def padded(self, multiple: int, width: int) -> Tensor:
        """All rows and zeros up to the next multiple."""
        if self.count == 0:
            return torch.empty(0, width)
        return self._buffer[: -(-self.count // multiple) * multiple]


class StateRing:
    """The last `depth` raw compressor rows of a sequence; the row of token t lies at t % depth."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._rows = torch.empty(0, 0)

    def at(self, positions: Tensor, width: int) -> Tensor:
        """Rows of `positions`, all among the last `depth`; value 0 and gate -inf before position 0."""
        self._ensure(width)
        return self._rows[positions % self.depth]

    def put(self, rows: Tensor, first: int) -> None:
        """Rows [n <= depth, width] of positions first, first + 1, ..."""
        self._ensure(rows.shape[1])
        if rows.shape[0] == 1:
            self._rows[first % self.depth] = rows[0]
        else:
            self._rows[torch.arange(first, first + rows.shape[0]) % self.depth] = rows

    def _ensure(self, width: int) -> None:
        if self._rows.shape[0] == 0:
            self._rows = torch.zeros(self.depth, width)
            self._rows[:, width // 2 :] = -torch.inf


class LocalSequence:
    """One sequence's KV; implements PrefillKV."""

    def __init__(self, config: ModelConfig, quantise: bool = True) -> None:
        if quantise and (config.head_dim, config.index_head_dim) != (512, 128):
            raise ValueError(
                f"rows of {config.head_dim} and index keys of {config.index_head_dim}; only 512 and 128 are quantised"
            )
        self.config = config
        self.quantise = quantise
        self.length = 0
        layers = range(config.num_layers)
        self.window = [GrowingRows() for _ in layers]
        self.state = {
            (layer, kind): StateRing(128 if kind is CacheKind.C128 else 8) for layer in layers for kind in CacheKind
        }
        self.entries = {(layer, kind): GrowingRows() for layer in layers for kind in CacheKind}

    def kept_rows(self, rows: Tensor) -> Tensor:
        """Main rows as attention will see them."""
        if not self.quantise or rows.shape[0] == 0:
            return rows
        from common.kv.quantise import dequantise_rows, quantise_rows

        return dequantise_rows(*quantise_rows(rows.contiguous()))

    def kept_entries(self, kind: CacheKind, entries: Tensor) -> Tensor:
        if kind is not CacheKind.INDEX or not self.quantise or entries.shape[0] == 0:
            return entries if kind is CacheKind.INDEX else self.kept_rows(entries)
        from common.kv.quantise import dequantise_index_keys, quantise_index_keys

        return dequantise_index_keys(*quantise_index_keys(entries.contiguous()))

    def extend_window(self, layer: int, rows: Tensor) -> Tensor:
        self.window[layer].append(self.kept_rows(rows))
        before = min(self.length, self.config.sliding_window - 1)
        return self.window[layer].rows(self.length - before, self.length + rows.shape[0])

    def extend_state(self, layer: int, kind: CacheKind, rows: Tensor) -> Tensor:
        ring = self.state[layer, kind]
        first = 128 * (self.length // 128) if kind is CacheKind.C128 else max(0, 4 * (self.length // 4) - 4)
        older = ring.at(torch.arange(first, self.length), rows.shape[1])
        skipped = max(0, rows.shape[0] - ring.depth)
        ring.put(rows[skipped:], self.length + skipped)
        return torch.cat((older, rows)) if older.shape[0] else rows

    def extend_entries(self, layer: int, kind: CacheKind, entries: Tensor) -> Tensor:
        kept = self.entries[layer, kind]
        if entries.shape[0]:
            kept.append(self.kept_entries(kind, entries))
        return kept.rows(0, kept.count) if kept.count else entries

    def rotate_index_queries(self, queries: Tensor) -> Tensor:
        if not self.quantise:
            return queries
        from common.kv.quantise import rotate_queries

        return rotate_queries(queries)

    def advance(self, tokens: int) -> None:
        self.length += tokens


class LocalBatch:
    """Several sequences, one token each; implements DecodeKV. Call `advance` after every step."""

    def __init__(self, sequences: Sequence[LocalSequence]) -> None:
        self.sequences = list(sequences)
        self.config = self.sequences[0].config
        self.positions = torch.tensor([sequence.length for sequence in self.sequences])

    def advance(self) -> None:
        for sequence in self.sequences:
            sequence.advance(1)
        self.positions = self.positions + 1

    def extend_window(self, layer: int, rows: Tensor) -> Tensor:
        window = self.config.sliding_window
        kept = self.sequences[0].kept_rows(rows)
        seen = rows.new_zeros(rows.shape[0], window, rows.shape[1])
        for b, sequence in enumerate(self.sequences):
            sequence.window[layer].append(kept[b : b + 1])
            count = sequence.window[layer].count
            recent = sequence.window[layer].rows(max(0, count - window), count)
            seen[b, window - recent.shape[0] :] = recent
        return seen

    def extend_state(self, layer: int, kind: CacheKind, rows: Tensor, closing: Tensor) -> Tensor:
        for b, sequence in enumerate(self.sequences):
            sequence.state[layer, kind].put(rows[b : b + 1], sequence.length)
        depth = 128 if kind is CacheKind.C128 else 8
        found = rows.new_empty(closing.shape[0], depth, rows.shape[1])
        for index, b in enumerate(closing.tolist()):
            end = self.sequences[b].length + 1
            found[index] = self.sequences[b].state[layer, kind].at(torch.arange(end - depth, end), rows.shape[1])
        return found

    def append_entries(self, layer: int, kind: CacheKind, closing: Tensor, entries: Tensor) -> None:
        kept = self.sequences[0].kept_entries(kind, entries)
        for index, b in enumerate(closing.tolist()):
            target = self.sequences[b].entries[layer, kind]
            expected = int(self.positions[b]) // kind.ratio
            if target.count != expected:
                raise ValueError(f"sequence {b} holds {target.count} {kind.value} entries; entry {expected} came")
            target.append(kept[index : index + 1])

    def rotate_index_queries(self, queries: Tensor) -> Tensor:
        return self.sequences[0].rotate_index_queries(queries)

    def index_keys(self, layer: int) -> list[Tensor]:
        width = self.config.index_head_dim
        return [sequence.entries[layer, CacheKind.INDEX].padded(64, width) for sequence in self.sequences]

    def gather_c4(self, layer: int, entries: Tensor) -> Tensor:
        found = torch.zeros(*entries.shape, self.config.head_dim)
        for b, sequence in enumerate(self.sequences):
            kept = sequence.entries[layer, CacheKind.C4]
            if kept.count:
                torch.index_select(kept.rows(0, kept.count), 0, entries[b].clamp(min=0), out=found[b])
        return found.masked_fill_((entries < 0).unsqueeze(-1), 0.0)

    def c128_entries(self, layer: int) -> list[Tensor]:
        width = self.config.head_dim
        return [sequence.entries[layer, CacheKind.C128].padded(64, width) for sequence in self.sequences]
