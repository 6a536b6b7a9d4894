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
        self._handed_over = False
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

    def hand_over(self) -> None:
        """From now on a LocalBatch keeps the windows."""
        if self._handed_over:
            raise ValueError("this sequence already belongs to a batch")
        self._handed_over = True

    def extend_window(self, layer: int, rows: Tensor) -> Tensor:
        if self._handed_over:
            raise ValueError("this sequence belongs to a batch and can only be decoded")
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


class SlidingWindows:
    """Windows of B sequences in one layer, right-aligned, so that every step's window is a view."""

    def __init__(self, recent: Sequence[Tensor], window: int) -> None:
        """`recent`: for each sequence its last rows [<= window - 1, D]."""
        self._window = window
        self._rows = torch.zeros(len(recent), 2 * window, recent[0].shape[1])
        self._end = window - 1
        for b, rows in enumerate(recent):
            self._rows[b, self._end - rows.shape[0] : self._end] = rows

    def push(self, rows: Tensor) -> Tensor:
        """Appends [B, D]; returns [B, window, D]."""
        if self._end == self._rows.shape[1]:
            kept = self._rows[:, self._end - (self._window - 1) :].clone()
            self._end = self._window - 1
            self._rows[:, : self._end] = kept
        self._rows[:, self._end] = rows
        self._end += 1
        return self._rows[:, self._end - self._window : self._end]


class LocalBatch:
    """Several sequences, one token each; implements DecodeKV. Call `advance` after every step.

    The batch takes over its sequences' windows: they can neither be prefilled nor put into another batch again.
    """

    def __init__(self, sequences: Sequence[LocalSequence]) -> None:
        self.sequences = list(sequences)
        self.config = self.sequences[0].config
        self.positions = torch.tensor([sequence.length for sequence in self.sequences])
        self._windows: list[SlidingWindows] = []
        before = self.config.sliding_window - 1
        for layer in range(self.config.num_layers):
            kept = [sequence.window[layer] for sequence in self.sequences]
            recent = [rows.rows(max(0, rows.count - before), rows.count) for rows in kept]
            self._windows.append(SlidingWindows(recent, self.config.sliding_window))
        for sequence in self.sequences:
            sequence.hand_over()

    def advance(self) -> None:
        for sequence in self.sequences:
            sequence.advance(1)
        self.positions = self.positions + 1

    def extend_window(self, layer: int, rows: Tensor) -> Tensor:
        return self._windows[layer].push(self.sequences[0].kept_rows(rows))

    def extend_state(self, layer: int, kind: CacheKind, rows: Tensor, closing: Tensor) -> Tensor:
        for sequence, row in zip(self.sequences, rows.unsqueeze(1), strict=True):
            sequence.state[layer, kind].put(row, sequence.length)
        depth = 128 if kind is CacheKind.C128 else 8
        found = rows.new_empty(closing.shape[0], depth, rows.shape[1])
        for index, b in enumerate(closing.tolist()):
            end = self.sequences[b].length + 1
            found[index] = self.sequences[b].state[layer, kind].at(torch.arange(end - depth, end), rows.shape[1])
        return found

    def append_entries(self, layer: int, kind: CacheKind, closing: Tensor, entries: Tensor) -> None:
        kept = self.sequences[0].kept_entries(kind, entries)
        for index, b in enumerate(closing.tolist()):
            sequence = self.sequences[b]
            target, expected = sequence.entries[layer, kind], sequence.length // kind.ratio
            if target.count != expected:
                raise ValueError(f"sequence {b} holds {target.count} {kind.value} entries; entry {expected} came")
            target.append(kept[index : index + 1])

    def rotate_index_queries(self, queries: Tensor) -> Tensor:
        return self.sequences[0].rotate_index_queries(queries)

    def index_keys(self, layer: int) -> list[Tensor]:
        width = self.config.index_head_dim
        return [sequence.entries[layer, CacheKind.INDEX].padded(64, width) for sequence in self.sequences]

    def gather_c4(self, layer: int, entries: Tensor) -> Tensor:
        missing = entries < 0
        some_missing = bool(missing.any())
        wanted = entries.clamp(min=0) if some_missing else entries
        found = torch.empty(*entries.shape, self.config.head_dim)
        for sequence, ids, target in zip(self.sequences, wanted, found, strict=True):
            kept = sequence.entries[layer, CacheKind.C4]
            if kept.count:
                torch.index_select(kept.rows(0, kept.count), 0, ids, out=target)
        return found.masked_fill_(missing.unsqueeze(-1), 0.0) if some_missing else found

    def c128_entries(self, layer: int) -> list[Tensor]:
        width = self.config.head_dim
        return [sequence.entries[layer, CacheKind.C128].padded(64, width) for sequence in self.sequences]
