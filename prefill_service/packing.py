"""A chunk's place in the send ring: which bytes lie where, where they go, and their digests.

A span holds, layer by layer, the pages that the chunk touches; behind them, for the last chunk, window rows and
compressor states. Pages of a layer are adjacent, so that they leave in few large writes when the receiver's are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from common.kv.handover import Handover, RingRun
from common.kv.layout import (
    C4_PAGE,
    C128_PAGE,
    INDEX_PAGE,
    LOGICAL_PAGE_TOKENS,
    STATE_C4_WIDTH,
    STATE_C128_WIDTH,
    STATE_INDEX_WIDTH,
    WINDOW_PAGE,
    c128_page_count,
    host_page_count,
)
from common.model.kv_store import CacheKind
from common.transfer.alignment import Place
from common.transfer.digest import digest_of
from common.transfer.plan import Run
from common.transfer.send_ring import Span
from common.transfer.ticket import RegionKind, TransferTicket
from prefill_service.sequence_kv import SequenceKV

_KINDS = {CacheKind.C4: RegionKind.C4, CacheKind.INDEX: RegionKind.INDEX, CacheKind.C128: RegionKind.C128}
_PAGES = {CacheKind.C4: C4_PAGE, CacheKind.INDEX: INDEX_PAGE, CacheKind.C128: C128_PAGE}
_STATES = {
    CacheKind.C4: (RegionKind.STATE_C4, STATE_C4_WIDTH * 4),
    CacheKind.INDEX: (RegionKind.STATE_INDEX, STATE_INDEX_WIDTH * 4),
    CacheKind.C128: (RegionKind.STATE_C128, STATE_C128_WIDTH * 4),
}


def caches_of_ratio(ratio: int) -> tuple[CacheKind, ...]:
    if ratio == 4:
        return (CacheKind.C4, CacheKind.INDEX)
    return (CacheKind.C128,) if ratio == 128 else ()


@dataclass(frozen=True)
class SentRange:
    """`count` pages (or ring rows) from `first` on of one layer's region, with their digest if wanted."""

    layer: int
    kind: RegionKind
    first: int
    count: int
    digest: bytes


@dataclass(frozen=True)
class Outgoing:
    """What one post writes, and what it can be checked against."""

    runs: list[Run]
    ranges: list[SentRange]


@dataclass(frozen=True)
class ChunkPlan:
    """Tokens start ... end-1 of a prompt of `tokens`; `start` is a multiple of 256."""

    ratios: tuple[int, ...]
    tokens: int
    start: int
    end: int
    # The layers that this process computes and the share of them that it sends; None: all.
    place: Place | None = None

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(global id, ratio) of the layers computed here."""
        if self.place is None:
            return tuple(enumerate(self.ratios))
        return tuple((layer, self.ratios[layer]) for layer in self.place.layers)

    @property
    def first_page(self) -> int:
        return self.start // LOGICAL_PAGE_TOKENS

    @property
    def is_last(self) -> bool:
        return self.end == self.tokens

    def pages(self, kind: CacheKind) -> int:
        """Pages of a cache that the chunk puts entries into."""
        total = c128_page_count(self.end) if kind is CacheKind.C128 else host_page_count(self.end)
        return max(0, total - self.first_page)

    @property
    def complete_pages(self) -> int:
        """Of those, the leading ones that no later token changes."""
        return self.end // LOGICAL_PAGE_TOKENS - self.first_page

    def lacking(self, ticket: TransferTicket) -> tuple[int, int]:
        """Of the complete pages, those that the receiver lacks: the first, counted from the chunk's, and how many."""
        there = min(self.complete_pages, max(0, ticket.first_page - self.first_page))
        return there, self.complete_pages - there

    def page_offsets(self) -> dict[tuple[int, CacheKind], int]:
        """Byte offset in the span of each layer's first page."""
        offsets: dict[tuple[int, CacheKind], int] = {}
        offset = 0
        for layer, ratio in self.layers:
            for kind in caches_of_ratio(ratio):
                offsets[layer, kind] = offset
                offset += self.pages(kind) * _PAGES[kind].page_bytes
        return offsets

    @property
    def page_bytes(self) -> int:
        return sum(
            self.pages(kind) * _PAGES[kind].page_bytes for _, ratio in self.layers for kind in caches_of_ratio(ratio)
        )

    @property
    def span_bytes(self) -> int:
        """Size of the span; with the last chunk go window rows and states."""
        if not self.is_last:
            return self.page_bytes
        handover = Handover(self.tokens)
        rows = sum(run.count for run in handover.window_runs())
        total = self.page_bytes + len(self.layers) * rows * (WINDOW_PAGE.data_bytes + WINDOW_PAGE.scale_bytes)
        for _, ratio in self.layers:
            for kind in caches_of_ratio(ratio):
                total += sum(run.count for run in handover.state_runs(ratio)) * _STATES[kind][1]
        return total

    def staging(self, span: Span) -> dict[tuple[int, CacheKind], Tensor]:
        """The span's pages, [pages, page_bytes] uint8 for each layer and cache."""
        found: dict[tuple[int, CacheKind], Tensor] = {}
        for (layer, kind), offset in self.page_offsets().items():
            size = _PAGES[kind].page_bytes
            found[layer, kind] = span.data[offset : offset + self.pages(kind) * size].view(-1, size)
        return found


def outgoing_pages(plan: ChunkPlan, span: Span, ticket: TransferTicket, first: int, count: int) -> Outgoing:
    """Pages first ... first+count-1 of the chunk (counted from its first page), in every layer that has them; of
    those, what the receiver lacks and this rank sends."""
    place = plan.place or Place.whole(len(plan.ratios))
    there = min(count, max(0, ticket.first_page - plan.first_page - first))
    first, count = first + there, count - there
    runs: list[Run] = []
    ranges: list[SentRange] = []
    for (layer, kind), offset in plan.page_offsets().items():
        have = min(first + count, plan.pages(kind)) - first
        if have <= 0:
            continue
        mine, have = place.share_of_pages(layer, have)
        if have == 0:
            continue
        size, region = _PAGES[kind].page_bytes, _KINDS[kind]
        items = ticket.items_of(region)
        begin = span.address + offset + (first + mine) * size
        position = plan.first_page + first + mine
        for index in range(have):
            target = ticket.regions.address(layer, region, items[position - ticket.first_page + index], 0, size)
            end = ticket.regions.piece_end(layer, region, items[position - ticket.first_page + index])
            runs.append(Run(begin + index * size, target, size, end))
        digest = digest_of([(begin, have * size)]) if ticket.verify else b""
        ranges.append(SentRange(layer, region, position, have, digest))
    return Outgoing(runs, ranges)


def outgoing_rest(plan: ChunkPlan, span: Span, ticket: TransferTicket, kv: SequenceKV) -> Outgoing:
    """Of the last chunk: the partial pages, then window rows and states, which this packs into the span; of all of
    them, what this rank sends."""
    place = plan.place or Place.whole(len(plan.ratios))
    partial = outgoing_pages(plan, span, ticket, plan.complete_pages, 1)
    runs, ranges = partial.runs, partial.ranges
    handover = Handover(plan.tokens)
    cursor = plan.page_bytes
    for layer, ratio in plan.layers:
        number = -1
        for run in handover.window_runs():
            number += 1
            if not place.sends_run(layer, number):
                continue
            data, scales = kv.window_rows(layer, run.position, run.count)
            cursor = _put(span, cursor, [data, scales], WINDOW_PAGE.pieces(run.row, run.count), layer,
                          RegionKind.WINDOW, run, ticket, runs, ranges)  # fmt: skip
        for kind in caches_of_ratio(ratio):
            region, width = _STATES[kind]
            for run in handover.state_runs(ratio):
                number += 1
                if not place.sends_run(layer, number):
                    continue
                rows = kv.state_rows(layer, kind, run.position, run.count)
                cursor = _put(span, cursor, [rows], [(run.row * width, run.count * width)], layer,
                              region, run, ticket, runs, ranges)  # fmt: skip
    return Outgoing(runs, ranges)


def _put(
    span: Span,
    cursor: int,
    parts: Sequence[Tensor],
    pieces: Iterable[tuple[int, int]],
    layer: int,
    kind: RegionKind,
    run: RingRun,
    ticket: TransferTicket,
    runs: list[Run],
    ranges: list[SentRange],
) -> int:
    """Copies the parts of a ring run behind `cursor` of the span and adds their writes; returns the new cursor."""
    (item,) = ticket.items_of(kind)
    sent: list[tuple[int, int]] = []
    for part, (offset, size) in zip(parts, pieces, strict=True):
        from_bytes = part.contiguous().view(-1).view(span.data.dtype)
        span.data[cursor : cursor + size] = from_bytes
        sent.append((span.address + cursor, size))
        target = ticket.regions.address(layer, kind, item, offset, size)
        runs.append(Run(span.address + cursor, target, size, ticket.regions.piece_end(layer, kind, item)))
        cursor += size
    ranges.append(SentRange(layer, kind, run.row, run.count, digest_of(sent) if ticket.verify else b""))
    return cursor
