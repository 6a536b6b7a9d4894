"""Shares of the resident pages: filled while there is room, equal without, never with a gap, given back once."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_service.residency import ResidentPages


def test_pages_are_filled_backwards_from_the_newest_while_there_is_room():
    pages = ResidentPages(4)
    pages.begin(7, 5)
    opened = pages.open(7)
    assert pages.pages_of(7) == {5: opened}
    assert pages.before(7) == 4
    filled = [pages.fill(7) for _ in range(3)]
    assert pages.pages_of(7) == {5: opened, **dict(zip((4, 3, 2), filled, strict=True))}
    assert pages.fill(7) is None
    assert pages.take_changes() == {(7, page): resident for page, resident in pages.pages_of(7).items()}
    assert pages.take_changes() == {}
    assert pages.spills == 0


def test_who_has_less_takes_the_oldest_page_of_who_has_most():
    pages = ResidentPages(4)
    pages.begin(0, 3)
    pages.open(0)
    for _ in range(3):
        pages.fill(0)
    pages.begin(1, 9)
    pages.take_changes()
    before = pages.pages_of(0)
    assert pages.open(1) == before[0]
    assert pages.fill(1) == before[1]
    assert pages.fill(1) is None
    assert pages.pages_of(0) == {2: before[2], 3: before[3]}
    assert pages.pages_of(1) == {8: before[1], 9: before[0]}
    assert pages.spills == 2
    assert pages.take_changes() == {(0, 0): -1, (0, 1): -1, (1, 9): before[0], (1, 8): before[1]}


def test_a_new_page_replaces_the_oldest_of_the_same_request_at_equal_shares():
    pages = ResidentPages(2)
    for slot in (0, 1):
        pages.begin(slot, 0)
        pages.open(slot)
    pages.take_changes()
    (only,) = pages.pages_of(0).values()
    assert pages.open(0) == only
    assert pages.pages_of(0) == {1: only}
    assert pages.take_changes() == {(0, 0): -1, (0, 1): only}
    assert pages.spills == 0


def test_without_a_page_to_have_the_request_goes_on_without():
    pages = ResidentPages(1)
    for slot in (0, 1):
        pages.begin(slot, 0)
        pages.open(slot)
    assert pages.pages_of(1) == {}
    assert pages.open(1) is None
    pages.release(0)
    # Its newest page was not opened, so there is nothing to be filled behind it until the next one is.
    assert pages.before(1) == 1
    assert pages.open(1) is not None
    assert list(pages.pages_of(1)) == [2]


def test_a_slot_begins_once_and_releases_what_it_has():
    pages = ResidentPages(3)
    pages.begin(4, 1)
    with pytest.raises(ValueError, match="slot 4 has begun already"):
        pages.begin(4, 2)
    pages.open(4)
    pages.release(4)
    pages.release(4)
    assert (pages.allocator.free, pages.before(4), pages.has_begun(4)) == (3, -1, False)
    assert pages.take_changes() == {}
    pages.check_integrity()


def test_a_wrong_count_is_found():
    pages = ResidentPages(3)
    pages.begin(0, 1)
    pages.open(0)
    pages.allocator.take(1)
    with pytest.raises(ValueError, match="resident"):
        pages.check_integrity()


@settings(max_examples=150, deadline=None)
@given(total=st.integers(0, 12), seed=st.integers(0, 1 << 20))
def test_any_history_keeps_runs_without_gaps_and_a_table_that_agrees(total: int, seed: int):
    rng = random.Random(seed)
    pages = ResidentPages(total, seed)
    table: dict[tuple[int, int], int] = {}
    next_page: dict[int, int] = {}
    for _ in range(60):
        slot = rng.randrange(5)
        if slot not in next_page:
            next_page[slot] = rng.randrange(6)
            pages.begin(slot, next_page[slot])
        elif rng.random() < 0.15:
            pages.release(slot)
            del next_page[slot]
            table = {place: resident for place, resident in table.items() if place[0] != slot}
        elif rng.random() < 0.5:
            mine = pages.pages_of(slot)
            opened = pages.open(slot)
            if mine or any(len(pages.pages_of(other)) > 1 for other in next_page):
                assert opened is not None
            next_page[slot] += 1
        elif pages.before(slot) >= 0:
            richest = max(len(pages.pages_of(other)) for other in next_page)
            mine = len(pages.pages_of(slot))
            possible = pages.allocator.free > 0 or richest > mine + 1
            assert (pages.fill(slot) is not None) == possible
        table.update(pages.take_changes())
        pages.check_integrity()
        told = {place: resident for place, resident in table.items() if resident >= 0}
        held = {(s, page): resident for s in next_page for page, resident in pages.pages_of(s).items()}
        assert told == held
        assert len(set(held.values())) == len(held)
        for other, after in next_page.items():
            run = sorted(pages.pages_of(other))
            assert run == list(range(after - len(run), after))
