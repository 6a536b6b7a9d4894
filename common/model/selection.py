"""Exact top-k with a fixed tie rule: among equal scores the lowest entry wins.

Scores of an indexer are exactly zero whenever every head's ReLU is, so ties at the boundary are common; without
a rule the chosen set would depend on the implementation and on the shape of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_mask(scores: Tensor, count: int) -> Tensor:
    """Marks the `count` best of each row of scores [n, c] (c >= count): bool [n, c], exactly `count` a row.

    -inf marks entries that may not be seen; they are chosen only where a row has fewer than `count` others.
    """
    boundary = torch.topk(scores, count, dim=-1, sorted=True).values[:, -1:]
    chosen = scores >= boundary
    if bool((chosen.sum(-1) == count).all()):
        return chosen
    above = scores > boundary
    equal = chosen & ~above
    missing = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= missing))


def top_entries(scores: Tensor, count: int) -> Tensor:
    """The entries that `top_mask` marks, ascending: [n, count] int64."""
    return top_mask(scores, count).nonzero()[:, 1].view(scores.shape[0], count)
