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


def first_entries(counts: Tensor, topk: int) -> Tensor:
    """All entries of sequences that have at most `topk`: counts [B] int64 to [B, topk], -1 behind the last."""
    slots = torch.arange(topk, device=counts.device)
    return torch.where(slots < counts.unsqueeze(1), slots, -1)


def decode_selection(
    queries: Tensor, head_weights: Tensor, keys: Sequence[Tensor], counts: Tensor, everything: Tensor
) -> Tensor:
    """Entries that each of B decoded tokens reads: [B, topk] int64 ascending, -1 behind the last.

    queries [B, Hi, Di]; head_weights [B, Hi]; keys: for each sequence [c_padded, Di]; counts [B] int64;
    everything [B, topk] is `first_entries`, the answer for sequences with at most topk entries, whatever their
    scores.
    """
    topk = everything.shape[1]
    widest = max(topk, *(rows.shape[0] for rows in keys))
    products = queries.new_empty(queries.shape[0], queries.shape[1], widest)
    for b, rows in enumerate(keys):
        if rows.shape[0]:
            torch.mm(queries[b], rows.t(), out=products[b, :, : rows.shape[0]])
    # Multiplied and summed rather than one more product: every column's bits are then its own.
    scores = products.relu_().mul_(head_weights.unsqueeze(-1)).sum(1)
    unseen = torch.arange(widest, device=queries.device) >= counts.unsqueeze(1)
    chosen = top_entries(scores.masked_fill_(unseen, -torch.inf), topk)
    return torch.where((counts > topk).unsqueeze(1), chosen, everything)
