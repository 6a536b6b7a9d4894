"""Compressed entries: a learned per-channel softmax over the tokens of a window.

    alpha = softmax over the window's slots, for each channel;  e = sum alpha v;  entry = rope(RMS(e), first token)

Ratio 128 has one slot per token. Ratio 4 overlaps: entry w takes the A halves of tokens 4w-4 ... 4w-1 and the B
halves of tokens 4w ... 4w+3; entry 0 lacks the first four (value 0, gate -inf). A raw row of a token is
[values | gates + ape], the form the KV store keeps as state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.model.norms import RmsNorm
from common.model.rope import rotate_


class Compressor:
    """The window arithmetic of one layer's compressor: ratio 4 or 128, entries of width `width`."""

    def __init__(self, ratio: int, width: int, ape: Tensor, norm: Tensor, eps: float) -> None:
        self._ratio = ratio
        self._width = width
        self._ape = ape
        self._norm = RmsNorm(norm, eps)

    @property
    def row_width(self) -> int:
        """Width of a raw row: values and gates of one (ratio 128) or two (ratio 4) halves."""
        return 2 * self._ape.shape[1]

    def add_position_bias_(self, rows: Tensor, phase: Tensor) -> Tensor:
        """Adds ape[t mod ratio] to the gates of raw projected rows [T, row_width]; `phase` [T] is t mod ratio."""
        rows[:, self._ape.shape[1] :].add_(self._ape[phase])
        return rows

    def prefill(self, rows: Tensor, length: int, added: int, turn: Tensor) -> Tensor:
        """Entries that tokens length ... length + added - 1 complete.

        `rows` are the raw rows the store hands back: from token max(0, 4 * (length // 4) - 4) for ratio 4, from
        128 * (length // 128) for ratio 128. `turn` [n, R/2] rotates entry length // ratio and on. [n, width].
        """
        first = length // self._ratio
        count = (length + added) // self._ratio - first
        if count == 0:
            return rows.new_empty(0, self._width)
        if self._ratio == 128:
            windows = rows[: 128 * count].view(count, 128, -1)
            return self._combine(windows[..., : self._width], windows[..., self._width :], turn)
        # Entry 0 has no window before it: its older half is left empty.
        missing = 1 if first == 0 else 0
        older = rows[: 4 * (count - missing)].unflatten(0, (-1, 4))
        newer = rows[4 - 4 * missing :][: 4 * count].unflatten(0, (-1, 4))
        return self._overlap(older, newer, turn)

    def decode(self, rows: Tensor, turn: Tensor) -> Tensor:
        """Entries of windows that close: rows [n, 8 or 128, row_width] oldest first, turn [n, R/2]; [n, width]."""
        if self._ratio == 128:
            return self._combine(rows[..., : self._width], rows[..., self._width :], turn)
        return self._overlap(rows[:, :4], rows[:, 4:], turn)

    def _overlap(self, older: Tensor, newer: Tensor, turn: Tensor) -> Tensor:
        """Raw rows of each window, newer [n, 4, 4 width], and of the window before it, older [n or n - 1, 4,
        4 width] (n - 1: the first has none), as [vA vB gA gB]; to [n, width]."""
        w, count = self._width, newer.shape[0]
        missing = count - older.shape[0]
        values, gates = newer.new_empty(2, count, 8, w)
        values[:missing, :4] = 0.0
        gates[:missing, :4] = -torch.inf
        values[missing:, :4] = older[..., :w]
        gates[missing:, :4] = older[..., 2 * w : 3 * w]
        values[:, 4:] = newer[..., w : 2 * w]
        gates[:, 4:] = newer[..., 3 * w :]
        return self._combine(values, gates, turn)

    def _combine(self, values: Tensor, gates: Tensor, turn: Tensor) -> Tensor:
        """Values and gates [n, slots, width] to entries [n, width]."""
        entries = torch.softmax(gates, 1).mul_(values).sum(1)
        return rotate_(self._norm(entries), turn)
