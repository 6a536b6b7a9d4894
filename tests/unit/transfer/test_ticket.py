"""Tickets: addresses inside regions, everything else refused by name."""

import pytest

from common.rpc import ticket_messages
from common.rpc.identity import new_incarnation
from common.transfer.ticket import ITEM_BYTES, Region, RegionKind, RegionTable, TransferTicket, kinds_of_ratio

RATIOS = ((0, 0), (1, 4), (2, 128))


def table(items: int = 4) -> RegionTable:
    regions = []
    for layer, ratio in RATIOS:
        for kind in kinds_of_ratio(ratio):
            base = (layer * 16 + kind.value) << 32
            regions.append(Region(layer, kind, base, items * ITEM_BYTES[kind], ITEM_BYTES[kind]))
    return RegionTable(regions)


def ticket(regions: RegionTable | None = None, **changes: object) -> TransferTicket:
    values: dict = {
        "session": "h:1", "receiver_id": "r", "regions": regions or table(), "host_pages": (2, 0),
        "logical_pages": (1, 3), "window_slot": 3, "state_slot": 0, "verify": True,
    } | changes  # fmt: skip
    return TransferTicket(**values)


def test_addresses_are_base_plus_item_plus_offset():
    address = table().address(1, RegionKind.C4, 2, 576, 576)
    assert address == ((1 * 16 + 1) << 32) + 2 * 37440 + 576


@pytest.mark.parametrize(
    ("item", "offset", "size", "message"),
    [
        (4, 0, 1, "item 4 of layer 1 is not in"),
        (-1, 0, 1, "item -1"),
        (0, 37440, 1, "are not inside"),
        (0, 0, 37441, "are not inside"),
        (0, -1, 1, "are not inside"),
    ],
)
def test_addresses_outside_an_item_are_refused(item: int, offset: int, size: int, message: str):
    with pytest.raises(ValueError, match=message):
        table().address(1, RegionKind.C4, item, offset, size)


def test_a_good_ticket_passes_and_survives_its_message():
    good = ticket()
    good.check(512, RATIOS)
    message = ticket_messages.to_message(good, new_incarnation("decode"))
    back = ticket_messages.from_message(message)
    back.check(512, RATIOS)
    assert (back.host_pages, back.logical_pages, back.window_slot, back.state_slot) == ((2, 0), (1, 3), 3, 0)
    assert back.regions.items() == good.regions.items()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_pages": (2,)}, "host_c4_pages holds 1 pages, a prompt of 512 tokens needs 2"),
        ({"logical_pages": (1, 2, 3)}, "logical_pages holds 3"),
        ({"host_pages": (2, 2)}, "host_c4_pages names a page twice"),
        ({"host_pages": (2, 4)}, "C4 item 4"),
        ({"logical_pages": (1, 9)}, "item 9"),
        ({"window_slot": 4}, "WINDOW item 4"),
        ({"state_slot": 4}, "STATE_C4 item 4"),
    ],
)
def test_bad_tickets_are_refused_with_what_is_wrong(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ticket(**changes).check(512, RATIOS)


def test_a_missing_or_repeated_region_is_named():
    regions = [region for region in table().items() if region.kind is not RegionKind.STATE_INDEX]
    with pytest.raises(ValueError, match="region STATE_INDEX of layer 1 is missing"):
        ticket(RegionTable(regions)).check(512, RATIOS)
    with pytest.raises(ValueError, match="given twice"):
        RegionTable([*regions, regions[0]])
    with pytest.raises(ValueError, match="items of 37441 bytes, expected 37440"):
        RegionTable([Region(0, RegionKind.C4, 0, 37441, 37441)])


def test_pieces_hold_whole_items_and_end_where_the_region_does():
    size = ITEM_BYTES[RegionKind.C128]
    table = RegionTable([Region(3, RegionKind.C128, 1000, 7 * size, size)])
    assert table.piece_end(3, RegionKind.C128, 0) == 1000 + 7 * size
    pieces = table.in_pieces(2 * size + 5)
    ends = [(pieces.piece_end(3, RegionKind.C128, item) - 1000) // size for item in range(7)]
    assert ends == [2, 2, 4, 4, 6, 6, 7]
    (tiny,) = table.in_pieces(1).items()
    assert tiny.piece_bytes == size
    with pytest.raises(ValueError, match="no multiple of its items'"):
        RegionTable([Region(3, RegionKind.C128, 1000, 7 * size, size, size + 1)])


def test_a_ticket_names_only_the_pages_that_are_lacking():
    for tokens, first, host, logical in [
        (600, 1, (2, 0), (1, 3)),
        (515, 2, (), (1,)),
        (512, 2, (), ()),
        (600, 2, (3,), (3,)),
    ]:
        made = ticket(first_page=first, host_pages=host, logical_pages=logical)
        made.check(tokens, RATIOS)
        message = ticket_messages.to_message(made, new_incarnation("decode"))
        assert ticket_messages.from_message(message).first_page == first


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (1, "host_c4_pages holds 2 pages, a prompt of 512 tokens needs 1 behind page 1"),
        (3, "first_page is 3"),
        (-1, "-1"),
    ],
)
def test_lists_that_do_not_begin_with_the_first_lacking_page_are_refused(first: int, message: str):
    with pytest.raises(ValueError, match=message):
        ticket(first_page=first).check(512, RATIOS)
