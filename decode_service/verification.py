"""Checks a handover as it landed: digests of every range, and that every part of it came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from common.errors import ErrorReason, ServiceError
from common.kv.handover import Handover
from common.kv.layout import WINDOW_PAGE
from common.transfer.digest import digest_of
from common.transfer.landed_memory import LandedMemory
from common.transfer.ticket import ITEM_BYTES, RegionKind, TransferTicket, kinds_of_ratio

_STATE_ROWS = {RegionKind.STATE_C4: 8, RegionKind.STATE_INDEX: 8, RegionKind.STATE_C128: 128}


@dataclass(frozen=True)
class LandedRange:
    """`count` pages of the request (or rows of its slot) from `first` on, with the sender's digest."""

    layer: int
    kind: RegionKind
    first: int
    count: int
    digest: bytes


@dataclass
class HandoverCheck:
    """Collects the ranges of one handover. Thread-safe as long as one call runs at a time."""

    ticket: TransferTicket
    tokens: int
    ratios: tuple[tuple[int, int], ...]
    peer: str
    memory: LandedMemory = field(default_factory=LandedMemory)
    repeated: int = 0
    _covered: dict[tuple[int, RegionKind], set[int]] = field(
        default_factory=lambda: dict[tuple[int, RegionKind], set[int]]()
    )

    def add(self, ranges: Iterable[LandedRange]) -> None:
        """A range that came before is counted in `repeated` and ignored. Raises ServiceError: DIGEST_MISMATCH for
        other bytes than were sent, TRANSFER_FAILED for a range that is not this request's or overlaps another."""
        for landed in ranges:
            where = f"{landed.kind.name} {landed.first} ... {landed.first + landed.count - 1} of layer {landed.layer}"
            items = set(range(landed.first, landed.first + landed.count))
            seen = self._covered.setdefault((landed.layer, landed.kind), set())
            if items and items <= seen:
                self.repeated += 1
                continue
            if seen & items:
                raise ServiceError(ErrorReason.TRANSFER_FAILED, f"{where} from {self.peer} came twice in part")
            try:
                pieces = list(self._pieces(landed))
            except (ValueError, IndexError) as error:
                raise ServiceError(ErrorReason.TRANSFER_FAILED, f"{where} from {self.peer}: {error}") from None
            if self.ticket.verify:
                found = digest_of(pieces, self.memory)
                if found != landed.digest:
                    raise ServiceError(
                        ErrorReason.DIGEST_MISMATCH,
                        f"{where} from {self.peer} landed with other bytes than were sent",
                        field=f"{landed.kind.name}.{landed.layer}",
                        ours=found.hex(),
                        theirs=landed.digest.hex(),
                    )
            seen |= items

    def check_complete(self) -> None:
        """Raises ServiceError(TRANSFER_FAILED) that names the first part that did not come."""
        handover = Handover(self.tokens)
        for layer, ratio in self.ratios:
            for kind in kinds_of_ratio(ratio):
                missing = _needed(handover, kind, self.ticket.first_page) - self._covered.get((layer, kind), set())
                if missing:
                    raise ServiceError(
                        ErrorReason.TRANSFER_FAILED,
                        f"{kind.name} {min(missing)} of layer {layer} never came from {self.peer}",
                        field=f"{kind.name}.{layer}",
                    )

    def _pieces(self, landed: LandedRange) -> Iterator[tuple[int, int]]:
        address, kind = self.ticket.regions.address, landed.kind
        items = self.ticket.items_of(kind)
        if kind in (RegionKind.C4, RegionKind.INDEX, RegionKind.C128):
            begin = landed.first - self.ticket.first_page
            if begin < 0:
                raise ValueError(f"page {landed.first} was here before, pages come from {self.ticket.first_page} on")
            for place in range(begin, begin + landed.count):
                yield address(landed.layer, kind, items[place], 0, ITEM_BYTES[kind]), ITEM_BYTES[kind]
        elif kind is RegionKind.WINDOW:
            for offset, size in WINDOW_PAGE.pieces(landed.first, landed.count):
                yield address(landed.layer, kind, items[0], offset, size), size
        else:
            row = ITEM_BYTES[kind] // _STATE_ROWS[kind]
            size = landed.count * row
            yield address(landed.layer, kind, items[0], landed.first * row, size), size


def _needed(handover: Handover, kind: RegionKind, first_page: int) -> set[int]:
    """Pages of the request, or rows of its slot, that a handover must bring."""
    if kind in (RegionKind.C4, RegionKind.INDEX):
        return set(range(first_page, handover.host_pages))
    if kind is RegionKind.C128:
        return set(range(first_page, handover.c128_pages))
    if kind is RegionKind.WINDOW:
        runs = handover.window_runs()
    else:
        runs = handover.state_runs(128 if kind is RegionKind.STATE_C128 else 4)
    return {row for run in runs for row in range(run.row, run.row + run.count)}
