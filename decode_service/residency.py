"""Which C4 pages of which requests are resident on the device: the home that needs no swap-in.

A request's resident pages are the last ones it has, without a gap. While pages are free everybody fills up, backwards
from the newest entries; without free ones the shares are equal: who has fewer pages takes the oldest one of who has
most. Spilling moves nothing, since every resident row but the newest is on the host as well. Pages are named by their
place in the request's host page list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sortedcontainers import SortedSet

from decode_service.page_allocator import PageAllocator


@dataclass(slots=True)
class _Held:
    """Ids of the request's pages first, first + 1, ..."""

    first: int
    ids: deque[int] = field(default_factory=deque)


class ResidentPages:
    """Used by the engine's thread; `spills` and the allocator's counts may be read from any."""

    def __init__(self, total: int, shuffle_seed: int | None = None) -> None:
        self.allocator = PageAllocator("resident", total, shuffle_seed)
        self.spills = 0
        self._held: dict[int, _Held] = {}
        # (pages held, slot): the last one is the richest.
        self._by_count: Any = SortedSet()
        self._changes: dict[tuple[int, int], int] = {}

    def begin(self, slot: int, next_page: int) -> None:
        """The request in `slot` has nothing resident; `open` will be called for its pages from `next_page` on."""
        if slot in self._held:
            raise ValueError(f"resident pages: slot {slot} has begun already")
        self._held[slot] = _Held(next_page)
        self._by_count.add((0, slot))

    def has_begun(self, slot: int) -> bool:
        return slot in self._held

    def open(self, slot: int) -> int | None:
        """An id for the request's next page, if need be that of its own oldest one; None when there is none to have:
        then all of the request is elsewhere."""
        held = self._held[slot]
        taken = self._take(slot)
        if taken is None and held.ids:
            taken = self._drop_oldest(slot)
        if taken is None:
            held.first += 1
            return None
        self._add(slot, held.first + len(held.ids), taken)
        held.ids.append(taken)
        return taken

    def before(self, slot: int) -> int:
        """The page that `fill` would bring in; -1 when there is none."""
        held = self._held.get(slot)
        return held.first - 1 if held is not None else -1

    def fill(self, slot: int) -> int | None:
        """An id for the page before the first resident one; None when the request has its share."""
        held = self._held[slot]
        taken = self._take(slot)
        if taken is None:
            return None
        # `_take` never takes from the slot itself, so the first page is what it was.
        held.first -= 1
        self._add(slot, held.first, taken)
        held.ids.appendleft(taken)
        return taken

    def release(self, slot: int) -> None:
        """The request is over. Its changes that nobody took are dropped; the caller clears what it had of the slot."""
        held = self._held.pop(slot, None)
        if held is None:
            return
        self._by_count.remove((len(held.ids), slot))
        self.allocator.release(list(held.ids))
        for change in [change for change in self._changes if change[0] == slot]:
            del self._changes[change]

    @property
    def changes(self) -> Mapping[tuple[int, int], int]:
        """What `take_changes` would give."""
        return self._changes

    def take_changes(self) -> dict[tuple[int, int], int]:
        """(slot, page) -> id, or -1 for a page that is no longer resident: what changed since the last call."""
        changes, self._changes = self._changes, {}
        return changes

    def pages_of(self, slot: int) -> dict[int, int]:
        """page -> id."""
        held = self._held.get(slot)
        return {} if held is None else {held.first + place: page for place, page in enumerate(held.ids)}

    def check_integrity(self) -> None:
        """Raises ValueError unless exactly the requests' pages are owned and their counts are right."""
        self.allocator.check_integrity()
        self.allocator.check_holders([page for held in self._held.values() for page in held.ids], [])
        counts = sorted((len(held.ids), slot) for slot, held in self._held.items())
        if counts != list(self._by_count):
            raise ValueError(f"resident pages: counts {list(self._by_count)}, are {counts}")

    def _take(self, slot: int) -> int | None:
        free = self.allocator.take(1)
        if free is not None:
            return free[0]
        count, richest = self._by_count[-1]
        if count <= len(self._held[slot].ids) + 1:
            return None
        self.spills += 1
        return self._drop_oldest(richest)

    def _drop_oldest(self, slot: int) -> int:
        """The id stays owned: it is for the next holder."""
        held = self._held[slot]
        self._by_count.remove((len(held.ids), slot))
        self._changes[slot, held.first] = -1
        held.first += 1
        dropped = held.ids.popleft()
        self._by_count.add((len(held.ids), slot))
        return dropped

    def _add(self, slot: int, page: int, taken: int) -> None:
        """Before the page is put into the list."""
        count = len(self._held[slot].ids)
        self._by_count.remove((count, slot))
        self._by_count.add((count + 1, slot))
        self._changes[slot, page] = taken
