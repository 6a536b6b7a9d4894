"""Pages (or slots) of one pool: free, owned or quarantined, each exactly one of the three."""

from __future__ import annotations

import random
from collections.abc import Sequence


class PageAllocator:
    """Hands out ids 0 ... total-1, lowest first or shuffled by a seed. Used by one thread."""

    def __init__(self, name: str, total: int, shuffle_seed: int | None = None) -> None:
        self.name = name
        self.total = total
        order = list(range(total))
        if shuffle_seed is not None:
            random.Random(f"{name}:{shuffle_seed}").shuffle(order)  # noqa: S311 - an order, not a secret
        self._free = order[::-1]
        self._owned: set[int] = set()
        self._quarantined: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._owned)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def take(self, count: int) -> list[int] | None:
        """`count` ids, or None (and nothing taken) when fewer are free. Raises ValueError for a negative count."""
        if count < 0:
            raise ValueError(f"pool {self.name}: {count} pages asked for")
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._owned.update(taken)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Gives owned ids back. Raises ValueError, and gives none back, when one isn't owned."""
        self._leave(pages, self._owned, "owned")
        self._free.extend(reversed(pages))

    def quarantine(self, pages: Sequence[int]) -> None:
        """Sets owned ids aside: somebody may still write them. Raises ValueError as `release` does."""
        self._leave(pages, self._owned, "owned")
        self._quarantined.update(pages)

    def release_quarantined(self, pages: Sequence[int]) -> None:
        """Nobody can write them any more. Raises ValueError as `release` does."""
        self._leave(pages, self._quarantined, "quarantined")
        self._free.extend(reversed(pages))

    def check_integrity(self) -> None:
        """Raises ValueError unless every id is in exactly one state."""
        free = set(self._free)
        together = len(free) + len(self._owned) + len(self._quarantined)
        if len(free) != len(self._free) or together != self.total:
            raise ValueError(
                f"pool {self.name}: {len(self._free)} free + {len(self._owned)} owned + "
                f"{len(self._quarantined)} quarantined is not {self.total}"
            )
        everything = free | self._owned | self._quarantined
        if everything != set(range(self.total)):
            raise ValueError(f"pool {self.name}: an id is in two states at once")

    def check_holders(self, owned: Sequence[int], quarantined: Sequence[int]) -> None:
        """Raises ValueError unless holders name every owned and quarantined id exactly once and no other."""
        for name, named, state in (("owned", owned, self._owned), ("quarantined", quarantined, self._quarantined)):
            wrong = set(named) ^ state
            if len(set(named)) != len(named) or wrong:
                raise ValueError(
                    f"pool {self.name}: requests name {len(named)} {name} pages, {len(state)} are; "
                    f"in dispute: {sorted(wrong)[:8]}"
                )

    def _leave(self, pages: Sequence[int], state: set[int], name: str) -> None:
        if len(set(pages)) != len(pages):
            raise ValueError(f"pool {self.name}: {list(pages)} names a page twice")
        strange = [page for page in pages if page not in state]
        if strange:
            raise ValueError(f"pool {self.name}: page {strange[0]} is not {name}")
        state.difference_update(pages)
