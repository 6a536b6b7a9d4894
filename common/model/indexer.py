"""The lightning indexer: which compressed entries a query reads.

    S(t, w) = Hi^-1/2 Di^-1/2 sum over heads of omega(t, h) ReLU(q(t, h) . k(w))

and a query reads the index_topk entries of largest S among those it may see (all of them while they are fewer).
Scores of a sequence are computed from shapes that depend on that sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.model.selection import top_entries


def index_scores(queries: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """queries [n, Hi, Di], head_weights [n, Hi] (scaled), keys [c, Di], all fp32, to scores [n, c]."""
    n, heads, width = queries.shape
    products = torch.mm(queries.reshape(n * heads, width), keys.t()).relu_()
    return torch.bmm(head_weights.unsqueeze(1), products.view(n, heads, -1)).squeeze(1)


def decode_selection(
    queries: Tensor, head_weights: Tensor, keys: Sequence[Tensor], counts: Sequence[int], topk: int
) -> Tensor:
    """Entries that each of B decoded tokens reads: [B, topk] int64 ascending, -1 behind the last.

    queries [B, Hi, Di]; head_weights [B, Hi]; keys: for each sequence [c_padded, Di] with c_padded >= counts[b]
    a multiple of 64. A sequence with at most `topk` entries reads all of them, whatever their scores.
    """
    device = queries.device
    slots = torch.arange(topk, device=device)
    selected = torch.where(slots < torch.tensor(counts, device=device).unsqueeze(1), slots, -1)
    crowded = [b for b, count in enumerate(counts) if count > topk]
    if not crowded:
        return selected
    widest = max(counts[b] for b in crowded)
    scores = queries.new_full((len(crowded), widest), -torch.inf)
    for row, b in enumerate(crowded):
        found = index_scores(queries[b : b + 1], head_weights[b : b + 1], keys[b])
        scores[row, : counts[b]] = found[0, : counts[b]]
    selected[torch.tensor(crowded, device=device)] = top_entries(scores, topk)
    return selected
