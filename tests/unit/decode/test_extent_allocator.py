"""Extents: what is taken lies together, what is freed joins, nothing is ever in two places."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from decode_service.extent_allocator import Extent, ExtentAllocator


def test_a_request_takes_the_shortest_run_that_holds_it():
    pool = ExtentAllocator("p", 100)
    first = [pool.take(10), pool.take(30), pool.take(10), pool.take(5), pool.take(10)]
    assert first[0] == list(range(10))
    for gap in (1, 3):
        pages = first[gap]
        assert pages is not None
        pool.release(pages)
    assert pool.take_extents(4) == [Extent(50, 4)]
    assert pool.take_extents(29) == [Extent(10, 29)]
    pool.check_integrity()


def test_freed_runs_join_their_neighbours():
    pool = ExtentAllocator("p", 30)
    parts = [pool.take(10) for _ in range(3)]
    for index in (0, 2, 1):
        pages = parts[index]
        assert pages is not None
        pool.release(pages)
        pool.check_integrity()
    assert pool.fragmentation().free_runs == 1
    assert pool.fragmentation().largest_run == 30
    assert pool.fragmentation().mean_extent_pages == 0


def test_a_request_that_fits_no_run_is_split_over_the_longest():
    pool = ExtentAllocator("p", 40)
    parts = [pool.take(n) for n in (10, 5, 12, 5, 8)]
    for index in (0, 2, 4):
        pages = parts[index]
        assert pages is not None
        pool.release(pages)
    assert pool.take_extents(31) is None
    assert pool.take_extents(25) == [Extent(15, 12), Extent(0, 10), Extent(32, 3)]
    pool.check_integrity()


def test_growth_room_is_used_by_its_request_and_given_to_others_last():
    pool = ExtentAllocator("p", 40)
    (mine,) = pool.take_extents(10, growth=6) or []
    (other,) = pool.take_extents(10) or []
    assert (mine, other) == (Extent(0, 10), Extent(16, 10))
    assert pool.extend(mine, 4) == [Extent(10, 4)]
    pool.check_integrity()
    # Others get the rest of the room only when nothing else is left.
    assert pool.take_extents(14) == [Extent(26, 14)]
    assert pool.take_extents(2) == [Extent(14, 2)]
    assert pool.free == 0
    pool.check_integrity()


def test_growth_behind_a_neighbour_goes_elsewhere():
    pool = ExtentAllocator("p", 30)
    (mine,) = pool.take_extents(10) or []
    pool.take(10)
    assert pool.extend(mine, 3) == [Extent(20, 3)]
    assert pool.extend(mine, 8) is None
    pool.check_integrity()


def test_shuffled_pages_come_in_small_pieces_in_no_order():
    pool = ExtentAllocator("p", 200, shuffle_seed=4)
    pages = pool.take(60)
    assert pages is not None
    assert len(set(pages)) == 60
    assert pages != sorted(pages)
    assert pool.fragmentation().mean_extent_pages < 4
    pool.check_integrity()


@pytest.mark.parametrize(
    ("pages", "message"), [([0, 0], "names a page twice"), ([3], "page 3 is not owned"), ([9], "page 9 is not owned")]
)
def test_what_is_not_owned_is_refused_and_nothing_changes(pages: list[int], message: str):
    pool = ExtentAllocator("p", 8)
    pool.take(3)
    with pytest.raises(ValueError, match=message):
        pool.release([*pages])
    with pytest.raises(ValueError, match="is not quarantined"):
        pool.release_quarantined([0])
    assert pool.used == 3
    pool.check_integrity()


class Churn(RuleBasedStateMachine):
    """Any order of takes, growth, quarantines and releases keeps every page in exactly one place."""

    @initialize(total=st.integers(1, 60), shuffle=st.none() | st.integers(0, 3))
    def begin(self, total: int, shuffle: int | None) -> None:
        self.pool = ExtentAllocator("p", total, shuffle)
        self.owned: list[list[int]] = []
        self.aside: list[list[int]] = []

    @rule(count=st.integers(0, 40), growth=st.integers(0, 10))
    def take(self, count: int, growth: int) -> None:
        pages = self.pool.take(count, growth)
        if pages:
            self.owned.append(pages)

    @rule(which=st.integers(0, 1 << 20), count=st.integers(1, 12))
    def extend(self, which: int, count: int) -> None:
        if self.owned:
            pages = self.owned[which % len(self.owned)]
            more = self.pool.extend(Extent(pages[-1], 1), count)
            pages += [page for extent in more or [] for page in range(extent.first, extent.end)]

    @rule(which=st.integers(0, 1 << 20))
    def release(self, which: int) -> None:
        if self.owned:
            self.pool.release(self.owned.pop(which % len(self.owned)))

    @rule(which=st.integers(0, 1 << 20))
    def quarantine(self, which: int) -> None:
        if self.owned:
            pages = self.owned.pop(which % len(self.owned))
            self.pool.quarantine(pages)
            self.aside.append(pages)

    @rule(which=st.integers(0, 1 << 20))
    def settle(self, which: int) -> None:
        if self.aside:
            self.pool.release_quarantined(self.aside.pop(which % len(self.aside)))

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            owned, aside = ([p for pages in lists for p in pages] for lists in (self.owned, self.aside))
            self.pool.check_holders(owned, aside)
            report = self.pool.fragmentation()
            assert report.owned_pages == len(owned)
            assert (report.extents > 0) == (len(owned) > 0)


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
