"""Decode attention and index scores straight from packed pages: the interface, and its definition in torch.

Shapes are fixed, counts live on the device, nothing waits: a step made of these can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.kernels.interface import KVKernels
from common.kv.layout import INDEX_PAGE, PageLayout


@dataclass(frozen=True)
class PackedRows:
    """Rows that each sequence attends to: places [B, n] int64 in `pages` ([p, page_bytes] uint8), -1 = none; a sequence
    has none behind its first counts [B] int64 places."""

    pages: Tensor
    places: Tensor
    counts: Tensor
    layout: PageLayout


class DecodeAttention(Protocol):
    def attend(self, queries: Tensor, sinks: Tensor, near: PackedRows, far: PackedRows | None) -> Tensor:
        """Softmax attention with a sink: queries [B, H, 512] fp32, scaled; sinks [H] fp32; over the rows of `near` and
        `far` together, each row key and value at once. [B, H, 512] fp32; a sequence without rows gives zeros."""
        ...

    def index_scores(
        self, queries: Tensor, head_weights: Tensor, pages: Tensor, table: Tensor, counts: Tensor
    ) -> Tensor:
        """sum over heads of w ReLU(q . k) for every entry: queries [B, Hi, 128] fp32 in the keys' basis, head_weights
        [B, Hi] fp32, pages [p, 8448] uint8, table [B, P] int64, counts [B] int64. [B, 64 P] fp32, -inf from an
        entry's count on."""
        ...


class TorchDecodeAttention:
    """The definition: unpacks, then multiplies in fp32."""

    def __init__(self, kernels: KVKernels) -> None:
        self._kernels = kernels

    def attend(self, queries: Tensor, sinks: Tensor, near: PackedRows, far: PackedRows | None) -> Tensor:
        """See DecodeAttention.attend."""
        parts = [near] if far is None else [near, far]
        batch, heads, _ = queries.shape
        rows: list[Tensor] = []
        hidden: list[Tensor] = []
        for part in parts:
            unpacked = self._kernels.unpack_rows(part.pages, part.places.flatten(), part.layout)
            rows.append(unpacked.view(batch, part.places.shape[1], -1))
            at = torch.arange(part.places.shape[1], device=queries.device)
            hidden.append((part.places < 0) | (at >= part.counts.unsqueeze(1)))
        keys, masked = torch.cat(rows, 1), torch.cat(hidden, 1)
        scores = torch.bmm(queries, keys.transpose(1, 2)).masked_fill_(masked.unsqueeze(1), -torch.inf)
        sink = sinks.view(1, heads, 1).expand(batch, heads, 1)
        weights = torch.softmax(torch.cat((scores, sink), -1), -1)
        return torch.bmm(weights[..., :-1], keys)

    def index_scores(
        self, queries: Tensor, head_weights: Tensor, pages: Tensor, table: Tensor, counts: Tensor
    ) -> Tensor:
        """See DecodeAttention.index_scores."""
        batch, width = table.shape
        keys = self._kernels.unpack_index_pages(pages, table.clamp(min=0).flatten())
        keys = keys.view(batch, width * INDEX_PAGE.rows, -1)
        products = torch.bmm(queries, keys.transpose(1, 2)).relu_()
        scores = torch.bmm(head_weights.unsqueeze(1), products).squeeze(1)
        at = torch.arange(scores.shape[1], device=queries.device)
        return scores.masked_fill_(at >= counts.unsqueeze(1), -torch.inf)


def top_entries_fixed(scores: Tensor, counts: Tensor, topk: int) -> Tensor:
    """The `topk` best entries of each row of scores [B, n] fp32, of which counts [B] exist: [B, topk] int64 ascending,
    -1 behind the last. Among equal scores the lowest entry wins, as everywhere. Nothing waits."""
    bits = scores.view(torch.int32).to(torch.int64)
    # Larger floats to larger integers; minus zero and zero are one score.
    ordered = torch.where(bits < 0, torch.bitwise_xor(bits, 0x7FFFFFFF), bits)
    ordered = torch.where(scores == 0, 0, ordered)
    entry = torch.arange(scores.shape[1], device=scores.device)
    keyed = (ordered << 32) | (0xFFFFFFFF - entry)
    best = torch.topk(keyed, min(topk, scores.shape[1]), dim=-1, sorted=False).values
    chosen = 0xFFFFFFFF - (best & 0xFFFFFFFF)
    behind = scores.shape[1]
    chosen = torch.where(chosen < counts.unsqueeze(1), chosen, behind).sort(dim=-1).values
    if chosen.shape[1] < topk:
        chosen = torch.nn.functional.pad(chosen, (0, topk - chosen.shape[1]), value=behind)
    return torch.where(chosen < behind, chosen, -1)
