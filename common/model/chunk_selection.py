"""Which compressed entries the queries of one prefill chunk read, scored in blocks of bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from common.model.indexer import index_scores
from common.model.selection import top_entries, top_mask

SCORING_BLOCK = 256
SCORE_VALUES = 1 << 24
"""Most head scores that exist at once: 64 MiB."""


class ChunkSelection:
    """Selections of a chunk at positions length ...: queries [T, Hi, Di], head_weights [T, Hi] (scaled), keys
    [c, Di] of all entries of the sequence, the chunk's own included. Blocks depend on the sequence alone."""

    def __init__(self, queries: Tensor, head_weights: Tensor, keys: Tensor, topk: int, length: int) -> None:
        self.topk = topk
        self._queries = queries
        self._head_weights = head_weights
        self._keys = keys
        self._length = length
        self._hidden_start = -1
        self._hidden = torch.empty(0, 0, dtype=torch.bool, device=keys.device)

    def hidden(self, start: int, stop: int) -> Tensor:
        """Bool [stop - start, >= c of the last row]: True where a chunk row may not or does not read an entry.

        Rows start ... stop - 1 must lie in one block of SCORING_BLOCK rows.
        """
        first = start - start % SCORING_BLOCK
        if first != self._hidden_start:
            last = min(first + SCORING_BLOCK, self._queries.shape[0])
            scores, unseen = self._scores(first, last)
            self._hidden = ~top_mask(scores, self.topk) | unseen if scores.shape[1] > self.topk else unseen
            self._hidden_start = first
        return self._hidden[start - first : stop - first]

    def chosen(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Entries [stop - start, topk] int64 ascending, and which of them (bool) the row may not see."""
        scores, unseen = self._scores(start, stop)
        entries = top_entries(scores, self.topk)
        return entries, unseen.gather(1, entries)

    def _scores(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Scores of rows start ... stop - 1 and which entries they may not see (there -inf), both [n, c]."""
        device = self._queries.device
        visible = torch.arange(self._length + start + 1, self._length + stop + 1, device=device) // 4
        count = (self._length + stop) // 4
        keys = self._keys[:count]
        rows = max(1, SCORE_VALUES // (self._queries.shape[1] * max(count, 1)))
        parts = [
            index_scores(
                self._queries[row : min(row + rows, stop)], self._head_weights[row : min(row + rows, stop)], keys
            )
            for row in range(start, stop, rows)
        ]
        scores = parts[0] if len(parts) == 1 else torch.cat(parts)
        unseen = torch.arange(count, device=device) >= visible.unsqueeze(1)
        return scores.masked_fill_(unseen, -torch.inf), unseen
