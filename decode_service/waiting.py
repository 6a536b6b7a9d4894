"""Who gets memory next: first come, first served, with bounded overtaking.

A request that does not fit yet may be overtaken by later ones that do, `max_overtakes` times in all; then nobody behind
it is served before it. So short requests need not wait for a long one's memory, and the long one gets its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingQueue(Generic[T]):
    """Items in order of arrival, compared by identity. Used by one thread; a pass looks at each item once."""

    def __init__(self, max_overtakes: int) -> None:
        """`max_overtakes` 0 is strict first come, first served. Raises ValueError for a negative number."""
        if max_overtakes < 0:
            raise ValueError(f"max_overtakes = {max_overtakes} is negative")
        self._max_overtakes = max_overtakes
        self._items: list[_Waiting[T]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return (waiting.item for waiting in self._items)

    def append(self, item: T) -> None:
        self._items.append(_Waiting(item))

    def remove(self, item: T) -> bool:
        """Whether it was there."""
        kept = [waiting for waiting in self._items if waiting.item is not item]
        found = len(kept) < len(self._items)
        self._items = kept
        return found

    def serve(self, serves: Callable[[T], bool]) -> int:
        """Offers memory in order: `serves` takes it for an item, which then leaves, or says False. Returns how many
        served items overtook somebody. What `serves` raises is raised; the item it was raised for has left."""
        overtaking = 0
        passed: list[_Waiting[T]] = []
        left = self._items
        try:
            # The first was overtaken by everybody who overtook those behind it, so its number is the greatest.
            while left and not (passed and passed[0].overtaken >= self._max_overtakes):
                waiting, left = left[0], left[1:]
                if not serves(waiting.item):
                    passed.append(waiting)
                    continue
                for other in passed:
                    other.overtaken += 1
                overtaking += bool(passed)
        finally:
            self._items = passed + left
        return overtaking


class _Waiting(Generic[T]):
    def __init__(self, item: T) -> None:
        self.item = item
        self.overtaken = 0
