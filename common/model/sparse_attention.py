"""Softmax attention of many heads over one shared key/value row per position, with a learned sink.

A row is key and value at once. Each head has a sink logit that takes part in the softmax and has no value:
p_j = exp(l_j) / (sum exp(l) + exp(sink)). Queries come scaled by 1/sqrt(D).
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.model.chunk_selection import ChunkSelection

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


def attend_chunk(
    queries: Tensor,
    window: Tensor,
    entries: Tensor | None,
    ratio: int,
    length: int,
    window_size: int,
    sinks: Tensor,
    selection: ChunkSelection | None,
    output: Tensor,
) -> None:
    """A chunk of one sequence, in blocks of queries; fills `output` [T, H, D].

    queries [T, H, D] at positions length ...; window [P + T, D], the last P positions before the chunk and its
    own; entries [c, D] of `ratio` tokens each, of which position t sees the first (t + 1) // ratio, or those that
    `selection` picks. All shapes depend on the sequence alone.
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
        hidden = (columns > rows) | (columns <= rows - window_size)
        block, sink = queries[start:stop], sinks
        count = 0 if entries is None else (length + stop) // ratio
        if entries is None or count == 0:
            _attend_block(block, near, hidden, None, None, sink, output[start:stop])
            continue
        if selection is None or count <= selection.topk:
            visible = torch.arange(length + start + 1, length + stop + 1, device=device) // ratio
            unseen = torch.arange(count, device=device) >= visible.unsqueeze(1)
            _attend_block(block, near, hidden, entries[:count], unseen, sink, output[start:stop])
        elif count <= GATHER_FACTOR * selection.topk:
            unseen = selection.hidden(start, stop)[:, :count]
            _attend_block(block, near, hidden, entries[:count], unseen, sink, output[start:stop])
        else:
            chosen, unseen = selection.chosen(start, stop)
            _attend_gathered(block, near, hidden, entries[chosen], unseen, sink, output[start:stop])


def _attend_block(
    queries: Tensor,
    near: Tensor,
    near_hidden: Tensor,
    far: Tensor | None,
    far_hidden: Tensor | None,
    sinks: Tensor,
    output: Tensor,
) -> None:
    """All queries [n, H, D] over the same rows near [S, D] and far [c, D], masks bool [n, S] and [n, c]."""
    n, heads, width = queries.shape
    flat = queries.reshape(n * heads, width)
    split, count = near.shape[0], near.shape[0] + (0 if far is None else far.shape[0])
    scores = queries.new_empty(n * heads, count + 1)
    grouped = scores.view(n, heads, count + 1)
    torch.mm(flat, near.t(), out=scores[:, :split])
    grouped[..., :split].masked_fill_(near_hidden.unsqueeze(1), -torch.inf)
    if far is not None and far_hidden is not None:
        torch.mm(flat, far.t(), out=scores[:, split:count])
        grouped[..., split:count].masked_fill_(far_hidden.unsqueeze(1), -torch.inf)
    grouped[..., count] = sinks
    weights = torch.softmax(scores, -1)
    flat_output = output.view(n * heads, width)
    torch.mm(weights[:, :split], near, out=flat_output)
    if far is not None:
        flat_output.addmm_(weights[:, split:count], far)


def _attend_gathered(
    queries: Tensor,
    near: Tensor,
    near_hidden: Tensor,
    far: Tensor,
    far_hidden: Tensor,
    sinks: Tensor,
    output: Tensor,
) -> None:
    """As `_attend_block`, but every query has far rows of its own: far [n, K, D], far_hidden [n, K]."""
    n, heads, width = queries.shape
    split, count = near.shape[0], near.shape[0] + far.shape[1]
    scores = queries.new_empty(n * heads, count + 1)
    grouped = scores.view(n, heads, count + 1)
    torch.mm(queries.reshape(n * heads, width), near.t(), out=scores[:, :split])
    grouped[..., :split].masked_fill_(near_hidden.unsqueeze(1), -torch.inf)
    far_scores = torch.bmm(queries, far.transpose(1, 2))
    grouped[..., split:count] = far_scores.masked_fill_(far_hidden.unsqueeze(1), -torch.inf)
    grouped[..., count] = sinks
    weights = torch.softmax(scores, -1)
    torch.mm(weights[:, :split], near, out=output.view(n * heads, width))
    output.baddbmm_(weights.view(n, heads, -1)[..., split:count], far)
