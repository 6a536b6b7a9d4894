"""What the handover of a prompt carries: pure arithmetic, used by the sender and by the receiver's checks.

Pages are counted by their place in the request's own lists; which pool page that is, a ticket says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.kv.layout import (
    C4_PAGE,
    C128_PAGE,
    LOGICAL_PAGE_TOKENS,
    WINDOW_PAGE,
    WINDOW_TOKENS,
    c128_page_count,
    entry_count,
    host_page_count,
    logical_page_count,
)


@dataclass(frozen=True)
class RingRun:
    """Rows [row, row + count) of a ring, which hold positions position ... position + count - 1."""

    row: int
    count: int
    position: int


def ring_runs(first: int, end: int, size: int) -> tuple[RingRun, ...]:
    """Where positions first ... end-1 lie in a ring of `size` rows (row = position % size).

    Raises ValueError when they don't fit.
    """
    if not 0 <= end - first <= size:
        raise ValueError(f"positions {first} ... {end - 1} do not fit a ring of {size} rows")
    runs: list[RingRun] = []
    while first < end:
        row = first % size
        count = min(end - first, size - row)
        runs.append(RingRun(row, count, first))
        first += count
    return tuple(runs)


@dataclass(frozen=True)
class Handover:
    """The handover of a prompt of `tokens` tokens."""

    tokens: int

    @property
    def host_pages(self) -> int:
        """C4 pages, and as many index key pages."""
        return host_page_count(self.tokens)

    @property
    def logical_pages(self) -> int:
        return logical_page_count(self.tokens)

    @property
    def c128_pages(self) -> int:
        return c128_page_count(self.tokens)

    def complete_pages(self, computed: int) -> int:
        """Leading pages (C4, index and C128 alike) that no later token changes once `computed` tokens are
        computed; the partial page at the end goes with the last tokens."""
        return min(computed, self.tokens) // LOGICAL_PAGE_TOKENS

    def c4_rows(self, page: int) -> int:
        """Filled rows of C4 (and index) page `page`."""
        return min(max(entry_count(self.tokens, 4) - page * C4_PAGE.rows, 0), C4_PAGE.rows)

    def c128_rows(self, page: int) -> int:
        return min(max(entry_count(self.tokens, 128) - page * C128_PAGE.rows, 0), C128_PAGE.rows)

    def window_runs(self) -> tuple[RingRun, ...]:
        """The last 128 rows, in the request's window page."""
        return ring_runs(max(0, self.tokens - WINDOW_TOKENS), self.tokens, WINDOW_PAGE.rows)

    def state_runs(self, ratio: int) -> tuple[RingRun, ...]:
        """Live raw compressor rows: the last complete window and the partial one for ratio 4, the partial one
        for ratio 128."""
        begun = self.tokens // ratio * ratio
        first = max(0, begun - ratio) if ratio == 4 else begun
        return ring_runs(first, self.tokens, 8 if ratio == 4 else 128)

    def check_lists(self, host_pages: int, logical_pages: int, first_page: int = 0) -> None:
        """Raises ValueError, naming both lengths, when a ticket's page lists, which begin with page `first_page`, don't
        fit the prompt."""
        if not 0 <= first_page <= self.tokens // LOGICAL_PAGE_TOKENS:
            raise ValueError(
                f"first_page is {first_page}, a prompt of {self.tokens} tokens has "
                f"{self.tokens // LOGICAL_PAGE_TOKENS} full pages"
            )
        for name, have, need in (
            ("host_c4_pages", host_pages, self.host_pages - first_page),
            ("logical_pages", logical_pages, self.logical_pages - first_page),
        ):
            if have != need:
                behind = f" behind page {first_page}" if first_page else ""
                raise ValueError(f"{name} holds {have} pages, a prompt of {self.tokens} tokens needs {need}{behind}")


def page_runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    """Splits a page list into (place in the list, count) of runs that are consecutive pages."""
    begin = 0
    for place in range(1, len(pages) + 1):
        if place == len(pages) or pages[place] != pages[place - 1] + 1:
            yield begin, place - begin
            begin = place
