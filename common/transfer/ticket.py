"""Where one request's KV goes in the receiver's memory: registered regions and the request's places in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from common.kv.handover import Handover
from common.kv.layout import (
    C4_PAGE,
    C128_PAGE,
    INDEX_PAGE,
    STATE_C4_ROWS,
    STATE_C4_WIDTH,
    STATE_C128_ROWS,
    STATE_C128_WIDTH,
    STATE_INDEX_ROWS,
    STATE_INDEX_WIDTH,
    WINDOW_PAGE,
)


class RegionKind(Enum):
    """Values are those of dsv4pd.v1.RegionKind."""

    C4 = 1
    INDEX = 2
    C128 = 3
    WINDOW = 4
    STATE_C4 = 5
    STATE_INDEX = 6
    STATE_C128 = 7


ITEM_BYTES: dict[RegionKind, int] = {
    RegionKind.C4: C4_PAGE.page_bytes,
    RegionKind.INDEX: INDEX_PAGE.page_bytes,
    RegionKind.C128: C128_PAGE.page_bytes,
    RegionKind.WINDOW: WINDOW_PAGE.page_bytes,
    RegionKind.STATE_C4: STATE_C4_ROWS * STATE_C4_WIDTH * 4,
    RegionKind.STATE_INDEX: STATE_INDEX_ROWS * STATE_INDEX_WIDTH * 4,
    RegionKind.STATE_C128: STATE_C128_ROWS * STATE_C128_WIDTH * 4,
}


def kinds_of_ratio(ratio: int) -> tuple[RegionKind, ...]:
    """The regions that a layer of this ratio has."""
    if ratio == 4:
        return (
            RegionKind.C4,
            RegionKind.INDEX,
            RegionKind.WINDOW,
            RegionKind.STATE_C4,
            RegionKind.STATE_INDEX,
        )
    if ratio == 128:
        return (RegionKind.C128, RegionKind.WINDOW, RegionKind.STATE_C128)
    return (RegionKind.WINDOW,)


@dataclass(frozen=True)
class Region:
    """Item i of a registered buffer begins at base + i * item_bytes. It is registered in pieces of `piece_bytes`, a
    multiple of the item's (0 = as a whole)."""

    layer: int
    kind: RegionKind
    base: int
    size: int
    item_bytes: int
    piece_bytes: int = 0


class RegionTable:
    """The regions of one receiver, one a layer and kind."""

    def __init__(self, regions: Iterable[Region]) -> None:
        """Raises ValueError for a region given twice or with other item bytes than this build's."""
        self._regions: dict[tuple[int, RegionKind], Region] = {}
        for region in regions:
            place = (region.layer, region.kind)
            if place in self._regions:
                raise ValueError(f"region {region.kind.name} of layer {region.layer} is given twice")
            if region.item_bytes != ITEM_BYTES[region.kind]:
                raise ValueError(
                    f"region {region.kind.name} of layer {region.layer} has items of {region.item_bytes} bytes, "
                    f"expected {ITEM_BYTES[region.kind]}"
                )
            if region.piece_bytes % region.item_bytes:
                raise ValueError(
                    f"region {region.kind.name} of layer {region.layer} is registered in pieces of "
                    f"{region.piece_bytes} bytes, which is no multiple of its items' {region.item_bytes}"
                )
            self._regions[place] = region

    def in_pieces(self, max_bytes: int) -> RegionTable:
        """The same regions, registered in pieces of at most `max_bytes`, but of one item at least."""
        return RegionTable(
            replace(region, piece_bytes=max(1, max_bytes // region.item_bytes) * region.item_bytes)
            for region in self._regions.values()
        )

    def piece_end(self, layer: int, kind: RegionKind, item: int) -> int:
        """Address at which the piece ends that has this item."""
        region = self._regions[layer, kind]
        end = region.base + region.size
        if not region.piece_bytes:
            return end
        piece = item * region.item_bytes // region.piece_bytes
        return min(end, region.base + (piece + 1) * region.piece_bytes)

    def items(self) -> list[Region]:
        return list(self._regions.values())

    def address(self, layer: int, kind: RegionKind, item: int, offset: int, size: int) -> int:
        """Address of `size` bytes at `offset` of an item. Raises ValueError when they aren't inside it."""
        region = self._regions.get((layer, kind))
        if region is None:
            raise ValueError(f"layer {layer} has no region {kind.name}")
        count = region.size // region.item_bytes
        if not 0 <= item < count:
            raise ValueError(f"{kind.name} item {item} of layer {layer} is not in [0, {count})")
        if offset < 0 or size < 0 or offset + size > region.item_bytes:
            raise ValueError(
                f"bytes {offset} ... {offset + size} are not inside a {kind.name} item of {region.item_bytes}"
            )
        return region.base + item * region.item_bytes + offset

    def check_complete(self, ratios: Iterable[tuple[int, int]]) -> None:
        """Raises ValueError that names the first region that is missing for these (layer, ratio) pairs."""
        for layer, ratio in ratios:
            for kind in kinds_of_ratio(ratio):
                if (layer, kind) not in self._regions:
                    raise ValueError(f"region {kind.name} of layer {layer} is missing")


@dataclass(frozen=True)
class TransferTicket:
    """host_pages are host C4 page ids, logical_pages device page ids: two name spaces. Both lists begin with page
    `first_page` of the request; the pages before it are at the receiver already and are not named, so that no sender
    can write them."""

    session: str
    receiver_id: str
    regions: RegionTable
    host_pages: tuple[int, ...]
    logical_pages: tuple[int, ...]
    window_slot: int
    state_slot: int
    verify: bool
    first_page: int = 0

    def check(self, tokens: int, ratios: Iterable[tuple[int, int]]) -> None:
        """Raises ValueError unless this ticket can take a prompt of `tokens` tokens: list lengths, regions, and
        every id inside its region."""
        Handover(tokens).check_lists(len(self.host_pages), len(self.logical_pages), self.first_page)
        pairs = list(ratios)
        self.regions.check_complete(pairs)
        for name, pages in (("host_c4_pages", self.host_pages), ("logical_pages", self.logical_pages)):
            if len(set(pages)) != len(pages):
                raise ValueError(f"{name} names a page twice")
        for layer, ratio in pairs:
            for kind in kinds_of_ratio(ratio):
                for item in self.items_of(kind):
                    self.regions.address(layer, kind, item, 0, ITEM_BYTES[kind])

    def items_of(self, kind: RegionKind) -> tuple[int, ...]:
        """This request's items in a region of that kind, in order; of page kinds from `first_page` on."""
        if kind is RegionKind.C4:
            return self.host_pages
        if kind is RegionKind.INDEX:
            return self.logical_pages[: len(self.host_pages)]
        if kind is RegionKind.C128:
            return self.logical_pages
        return (self.window_slot if kind is RegionKind.WINDOW else self.state_slot,)
