"""Softmax attention of many heads over one shared key/value row per position, with a learned sink.

A row is key and value at once. Each head has a sink logit that takes part in the softmax and has no value:
p_j = exp(l_j) / (sum exp(l) + exp(sink)). Queries come scaled by 1/sqrt(D).
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.model.indexer import index_scores
from common.model.selection import top_entries, top_mask

QUERY_BLOCK = 64
GATHER_FACTOR = 16
"""From this many visible entries per selected one, fetching the selected rows is cheaper than masking all."""


def attend(
    queries: Tensor,
    window: Tensor,
    entries: Tensor | None,
    window_bias: Tensor | None,
    entry_bias: Tensor | None,
    sinks: Tensor,
) -> Tensor:
    """Each query with its own rows: queries [B, H, D], window [B, W, D], entries [B, E, D], biases [B, 1, W or E]
    (0 or -inf), sinks [H]; to [B, H, D]. All fp32."""
    batch, heads, _ = queries.shape
    scores = torch.bmm(queries, window.transpose(1, 2))
    if window_bias is not None:
        scores.add_(window_bias)
    sink = sinks.view(1, heads, 1).expand(batch, heads, 1)
    if entries is None or entries.shape[1] == 0:
        weights = torch.softmax(torch.cat((scores, sink), -1), -1)
        return torch.bmm(weights[..., :-1], window)
    entry_scores = torch.bmm(queries, entries.transpose(1, 2))
    if entry_bias is not None:
        entry_scores.add_(entry_bias)
    weights = torch.softmax(torch.cat((scores, entry_scores, sink), -1), -1)
    width = window.shape[1]
    output = torch.bmm(weights[..., :width], window)
    return output.baddbmm_(weights[..., width:-1], entries)


class IndexedEntries:
    """What the indexer of one chunk knows: its queries, head weights and all index keys of the sequence."""

    def __init__(self, queries: Tensor, head_weights: Tensor, keys: Tensor, topk: int) -> None:
        self.queries = queries
        self.head_weights = head_weights
        self.keys = keys
        self.topk = topk

    def scores(self, start: int, stop: int, visible: Tensor) -> Tensor:
        """Scores of chunk rows start ... stop - 1 over entries 0 ... visible[-1] - 1, -inf beyond visible[row]."""
        count = int(visible[-1])
        scores = index_scores(self.queries[start:stop], self.head_weights[start:stop], self.keys[:count])
        hidden = torch.arange(count, device=scores.device) >= visible.unsqueeze(1)
        return scores.masked_fill_(hidden, -torch.inf)


def attend_chunk(
    queries: Tensor,
    window: Tensor,
    entries: Tensor | None,
    ratio: int,
    length: int,
    window_size: int,
    sinks: Tensor,
    indexed: IndexedEntries | None,
    output: Tensor,
) -> None:
    """A chunk of one sequence, in blocks of queries; fills `output` [T, H, D].

    queries [T, H, D] at positions length ...; window [P + T, D], the last P positions before the chunk and its
    own; entries [c, D] of `ratio` tokens each, of which position t sees the first (t + 1) // ratio. All shapes
    depend on the sequence alone.
    """
    tokens = queries.shape[0]
    before = window.shape[0] - tokens
    device = queries.device
    for start in range(0, tokens, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, tokens)
        low = max(0, start + before - (window_size - 1))
        near = window[low : stop + before]
        rows = torch.arange(start + before, stop + before, device=device).unsqueeze(1)
        columns = torch.arange(low, stop + before, device=device)
        near_hidden = (columns > rows) | (columns <= rows - window_size)
        visible = torch.arange(length + start + 1, length + stop + 1, device=device)
        block = queries[start:stop]
        count = 0 if entries is None else (length + stop) // ratio
        if entries is None or count == 0:
            output[start:stop] = _attend_shared(block, near, near_hidden, sinks)
            continue
        visible = visible // ratio
        if indexed is None or count <= indexed.topk:
            far_hidden = torch.arange(count, device=device) >= visible.unsqueeze(1)
        else:
            scores = indexed.scores(start, stop, visible)
            if count > GATHER_FACTOR * indexed.topk:
                chosen = top_entries(scores, indexed.topk)
                output[start:stop] = _attend_gathered(block, near, near_hidden, entries, chosen, visible, sinks)
                continue
            far_hidden = ~top_mask(scores, indexed.topk)
            far_hidden |= torch.arange(count, device=device) >= visible.unsqueeze(1)
        keys = torch.cat((near, entries[:count]))
        output[start:stop] = _attend_shared(block, keys, torch.cat((near_hidden, far_hidden), 1), sinks)


def _attend_shared(queries: Tensor, keys: Tensor, hidden: Tensor, sinks: Tensor) -> Tensor:
    """All queries [n, H, D] over the same keys [S, D], `hidden` bool [n, S] masks; to [n, H, D]."""
    n, heads, width = queries.shape
    count = keys.shape[0]
    scores = queries.new_empty(n * heads, count + 1)
    torch.mm(queries.reshape(n * heads, width), keys.t(), out=scores[:, :count])
    grouped = scores.view(n, heads, count + 1)
    grouped[..., :count].masked_fill_(hidden.unsqueeze(1), -torch.inf)
    grouped[..., count] = sinks
    weights = torch.softmax(scores, -1)
    return torch.mm(weights[:, :count], keys).view(n, heads, width)


def _attend_gathered(
    queries: Tensor,
    near: Tensor,
    near_hidden: Tensor,
    entries: Tensor,
    chosen: Tensor,
    visible: Tensor,
    sinks: Tensor,
) -> Tensor:
    """As `_attend_shared` for the window, but each query fetches its own `chosen` [n, K] entries."""
    n, heads, width = queries.shape
    count = near.shape[0]
    topk = chosen.shape[1]
    scores = queries.new_empty(n * heads, count + topk + 1)
    torch.mm(queries.reshape(n * heads, width), near.t(), out=scores[:, :count])
    grouped = scores.view(n, heads, count + topk + 1)
    grouped[..., :count].masked_fill_(near_hidden.unsqueeze(1), -torch.inf)
    fetched = entries[chosen.flatten()].view(n, topk, width)
    far = torch.bmm(queries, fetched.transpose(1, 2))
    grouped[..., count:-1] = far.masked_fill_((chosen >= visible.unsqueeze(1)).unsqueeze(1), -torch.inf)
    grouped[..., -1] = sinks
    weights = torch.softmax(scores, -1)
    attended = torch.mm(weights[:, :count], near).view(n, heads, width)
    return attended.baddbmm_(weights.view(n, heads, -1)[..., count:-1], fetched)
