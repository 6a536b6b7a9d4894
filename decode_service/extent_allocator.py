"""Pages of one pool as few long extents: a request's pages lie together, so that swap-in reads few address
translations and the handover writes long runs.

Placement: the shortest free run that holds the request and its growth room (best fit), else the shortest that holds the
request; where no run is long enough, growth rooms are given up; where that does not help, the longest runs in turn.
Freed runs join their neighbours at once. A growth room is free memory beside a request that others are given last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sortedcontainers import SortedList

from common.kv.handover import page_runs

_FREE, _OWNED, _QUARANTINED, _CACHED = 0, 1, 2, 3
_NAMES = ("free", "owned", "quarantined", "cached")


@dataclass(frozen=True, slots=True)
class Extent:
    """Pages first ... first + count - 1."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True)
class Fragmentation:
    """extents, owned_pages: of all requests together; free_runs: how many, largest_run the longest (growth rooms are
    runs of their own)."""

    extents: int
    owned_pages: int
    free_runs: int
    largest_run: int

    @property
    def mean_extent_pages(self) -> float:
        """0 for an empty pool."""
        return self.owned_pages / self.extents if self.extents else 0.0


# What metrics and status show of it.
FRAGMENTATION: dict[str, Callable[[Fragmentation], float]] = {
    "mean_extent_pages": lambda f: f.mean_extent_pages,
    "free_runs": lambda f: f.free_runs,
    "largest_free_run": lambda f: f.largest_run,
}


class ExtentAllocator:
    """Hands out ids 0 ... total-1. Used by one thread; the counts may be read from any.

    `shuffle_seed` scatters pages on purpose, in pieces of one to three: tests use it so that no two lists of ids agree.
    """

    def __init__(self, name: str, total: int, shuffle_seed: int | None = None) -> None:
        self.name = name
        self.total = total
        self._random = None if shuffle_seed is None else random.Random(f"{name}:{shuffle_seed}")  # noqa: S311
        self._state = bytearray(total)
        self._counts = [total, 0, 0, 0]
        # Free runs by start and by end, and as (length, start) for best fit.
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._by_length: Any = SortedList()
        # Growth rooms by their start, which is the end of the request's last extent.
        self._rooms: dict[int, int] = {}
        # Owned pages that begin an extent of their request; all others continue the page before them.
        self._heads = bytearray(total)
        self._extents = 0
        if total:
            self._add_run(0, total)

    @property
    def free(self) -> int:
        return self._counts[_FREE]

    @property
    def used(self) -> int:
        return self._counts[_OWNED]

    @property
    def quarantined(self) -> int:
        return self._counts[_QUARANTINED]

    @property
    def cached(self) -> int:
        return self._counts[_CACHED]

    def fragmentation(self) -> Fragmentation:
        runs = len(self._by_length) + len(self._rooms)
        longest = self._by_length[-1][0] if self._by_length else 0
        largest = max(longest, *self._rooms.values()) if self._rooms else longest
        return Fragmentation(self._extents, self.used, runs, largest)

    def take(self, count: int, growth: int = 0) -> list[int] | None:
        """`count` ids in extents, or None (and nothing taken) when fewer are free; `growth` pages behind them are kept
        free while the pool has others. Raises ValueError for a negative number."""
        extents = self.take_extents(count, growth)
        return None if extents is None else [page for e in extents for page in range(e.first, e.end)]

    def take_extents(self, count: int, growth: int = 0) -> list[Extent] | None:
        """As `take`, the extents in the order of the request's pages."""
        if count < 0 or growth < 0:
            raise ValueError(f"pool {self.name}: {count} pages and room for {growth} asked for")
        if count > self.free:
            return None
        if count == 0:
            return []
        shuffle = self._random
        extents = self._placed(count, growth) if shuffle is None else self._scattered(count, shuffle)
        for extent in extents:
            self._mark(extent, _FREE, _OWNED)
        merged = _merged(extents)
        self._begin(merged)
        return merged

    def extend(self, last: Extent, count: int) -> list[Extent] | None:
        """`count` more pages for the request whose last extent is `last`: right behind it where that is free. None, and
        nothing taken, when fewer are free."""
        if count > self.free:
            return None
        found: list[Extent] = []
        room = self._rooms.pop(last.end, 0)
        if room:
            self._join(last.end, room)
        behind = self._starts.get(last.end, 0)
        if behind:
            near = min(behind, count)
            self._cut(last.end, near)
            found.append(Extent(last.end, near))
            self._mark(found[0], _FREE, _OWNED)
            if room > near and behind > near:
                self._keep_room(last.end + near, min(room, behind) - near)
        rest = count - sum(extent.count for extent in found)
        if rest:
            more = self.take_extents(rest)
            if more is None:
                raise ValueError(f"pool {self.name}: {rest} of {self.free} free pages can't be taken")
            found += more
        return found

    def release(self, pages: Sequence[int]) -> None:
        """Gives owned ids back. Raises ValueError, and gives none back, when one isn't owned."""
        for extent in self._leave(pages, _OWNED, _FREE):
            self._join(extent.first, extent.count)

    def quarantine(self, pages: Sequence[int]) -> None:
        """Sets owned ids aside: somebody may still write them. Raises ValueError as `release` does."""
        self._leave(pages, _OWNED, _QUARANTINED)

    def release_quarantined(self, pages: Sequence[int]) -> None:
        """Nobody can write them any more. Raises ValueError as `release` does."""
        for extent in self._leave(pages, _QUARANTINED, _FREE):
            self._join(extent.first, extent.count)

    def cache(self, pages: Sequence[int]) -> None:
        """Keeps owned ids for their content: nobody uses them, and they are not free. Raises ValueError as `release`
        does."""
        self._leave(pages, _OWNED, _CACHED)

    def reuse(self, pages: Sequence[int]) -> None:
        """Somebody uses cached ids: they are owned again. Raises ValueError as `release` does."""
        self._begin(self._leave(pages, _CACHED, _OWNED))

    def release_cached(self, pages: Sequence[int]) -> None:
        """Their content is given up. Raises ValueError as `release` does."""
        for extent in self._leave(pages, _CACHED, _FREE):
            self._join(extent.first, extent.count)

    def check_integrity(self) -> None:
        """Raises ValueError unless the free runs are the free pages, none of two touch and the counts are right."""
        counted = [self._state.count(state) for state in range(len(_NAMES))]
        if counted != self._counts or sum(counted) != self.total:
            raise ValueError(f"pool {self.name}: counts are {self._counts}, pages say {counted} of {self.total}")
        runs = sorted([*self._starts.items(), *self._rooms.items()])
        covered = bytearray(self.total)
        for first, count in runs:
            if count < 1 or any(covered[first : first + count]) or any(self._state[first : first + count]):
                raise ValueError(f"pool {self.name}: free run {first} + {count} overlaps or holds owned pages")
            covered[first : first + count] = b"\1" * count
        if sum(covered) != self.free:
            raise ValueError(f"pool {self.name}: runs hold {sum(covered)} pages, {self.free} are free")
        if self._ends != {s + n: s for s, n in self._starts.items()} or list(self._by_length) != sorted(
            (n, s) for s, n in self._starts.items()
        ):
            raise ValueError(f"pool {self.name}: the lists of free runs disagree")
        if any(first + count in self._starts for first, count in self._starts.items()):
            raise ValueError(f"pool {self.name}: two free runs touch and were not joined")
        if sum(self._heads) != self._extents or any(
            head and state != _OWNED for head, state in zip(self._heads, self._state, strict=True)
        ):
            raise ValueError(f"pool {self.name}: {self._extents} extents, {sum(self._heads)} pages begin one")

    def check_holders(self, owned: Sequence[int], quarantined: Sequence[int], cached: Sequence[int] = ()) -> None:
        """Raises ValueError unless holders name every owned, quarantined and cached id exactly once and no other."""
        for named, state in ((owned, _OWNED), (quarantined, _QUARANTINED), (cached, _CACHED)):
            name = _NAMES[state]
            wrong = [page for page in named if self._state[page] != state]
            if len(set(named)) != len(named) or wrong or len(named) != self._counts[state]:
                raise ValueError(
                    f"pool {self.name}: requests name {len(named)} {name} pages, {self._counts[state]} are; "
                    f"in dispute: {sorted(wrong)[:8]}"
                )

    def _placed(self, count: int, growth: int) -> list[Extent]:
        for wanted in {count + growth: growth, count: 0}:
            first = self._best_fit(wanted)
            if first is not None:
                self._cut(first, count)
                if wanted > count:
                    self._keep_room(first + count, growth)
                return [Extent(first, count)]
        if self._rooms:
            self._give_up_rooms()
            return self._placed(count, 0)
        found: list[Extent] = []
        while count:
            length, first = self._by_length[-1]
            part = min(count, length)
            # The last piece takes the shortest run that holds it.
            if part == count:
                first = self._best_fit(part)
                if first is None:
                    raise ValueError(f"pool {self.name}: no run of {part} pages, longest is {length}")
            self._cut(first, part)
            found.append(Extent(first, part))
            count -= part
        return found

    def _scattered(self, count: int, source: random.Random) -> list[Extent]:
        found: list[Extent] = []
        while count:
            length, start = self._by_length[source.randrange(len(self._by_length))]
            part = min(count, length, source.randint(1, 3))
            first = start + source.randrange(length - part + 1)
            self._cut_inside(start, first, part)
            found.append(Extent(first, part))
            count -= part
        source.shuffle(found)
        return found

    def _best_fit(self, count: int) -> int | None:
        place = self._by_length.bisect_left((count, -1))
        return self._by_length[place][1] if place < len(self._by_length) else None

    def _cut(self, first: int, count: int) -> None:
        """Takes the first `count` pages of the free run at `first`."""
        length = self._remove_run(first)
        if length > count:
            self._add_run(first + count, length - count)

    def _cut_inside(self, start: int, first: int, count: int) -> None:
        length = self._remove_run(start)
        if first > start:
            self._add_run(start, first - start)
        if start + length > first + count:
            self._add_run(first + count, start + length - first - count)

    def _keep_room(self, first: int, count: int) -> None:
        self._cut(first, count)
        self._rooms[first] = count

    def _give_up_rooms(self) -> None:
        rooms, self._rooms = self._rooms, {}
        for first, count in rooms.items():
            self._join(first, count)

    def _join(self, first: int, count: int) -> None:
        """Adds a free run, one with the free runs it touches."""
        after = first + count
        before = self._ends.get(first)
        if before is not None:
            count += self._remove_run(before)
            first = before
        if after in self._starts:
            count += self._remove_run(after)
        self._add_run(first, count)

    def _add_run(self, first: int, count: int) -> None:
        self._starts[first] = count
        self._ends[first + count] = first
        self._by_length.add((count, first))

    def _remove_run(self, first: int) -> int:
        count = self._starts.pop(first)
        del self._ends[first + count]
        self._by_length.remove((count, first))
        return count

    def _mark(self, extent: Extent, before: int, after: int) -> None:
        self._state[extent.first : extent.end] = bytes((after,)) * extent.count
        self._counts[before] -= extent.count
        self._counts[after] += extent.count

    def _leave(self, pages: Sequence[int], before: int, after: int) -> list[Extent]:
        name = _NAMES[before]
        runs = list(page_runs(list(pages))) if pages else []
        extents = [Extent(pages[place], count) for place, count in runs]
        wanted = bytes((before,))
        for extent in extents:
            inside = extent.first >= 0 and extent.end <= self.total
            if not inside or bytes(self._state[extent.first : extent.end]) != wanted * extent.count:
                strange = next(p for p in range(extent.first, extent.end) if not self._is(p, before))
                raise ValueError(f"pool {self.name}: page {strange} is not {name}")
        if len(extents) > 1 and len(set(pages)) != len(pages):
            raise ValueError(f"pool {self.name}: {list(pages)} names a page twice")
        for extent in extents:
            self._mark(extent, before, after)
            if before == _OWNED:
                self._end(extent)
                room = self._rooms.pop(extent.end, 0)
                if room:
                    self._join(extent.end, room)
        return extents

    def _begin(self, extents: Iterable[Extent]) -> None:
        """Owned pages that are extents of a request."""
        for extent in extents:
            self._heads[extent.first] = 1
            self._extents += 1

    def _end(self, extent: Extent) -> None:
        """Pages that are owned no more; what continued them begins an extent now."""
        self._extents -= self._heads.count(1, extent.first, extent.end)
        self._heads[extent.first : extent.end] = bytes(extent.count)
        if self._is(extent.end, _OWNED) and not self._heads[extent.end]:
            self._begin([Extent(extent.end, 1)])

    def _is(self, page: int, state: int) -> bool:
        return 0 <= page < self.total and self._state[page] == state


def _merged(extents: Iterable[Extent]) -> list[Extent]:
    """Neighbours in the list that continue one another become one."""
    merged: list[Extent] = []
    for extent in extents:
        if merged and merged[-1].end == extent.first:
            merged[-1] = Extent(merged[-1].first, merged[-1].count + extent.count)
        else:
            merged.append(extent)
    return merged
