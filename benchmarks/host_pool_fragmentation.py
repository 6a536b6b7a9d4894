"""How near to contiguous a host pool keeps its requests under hours of churn: extents, a free list, a buddy allocator.

    python -m benchmarks.host_pool_fragmentation [--pages 262144] [--requests 200000] [--fill 0.9]

Requests arrive with lognormal prompts (median 8 k tokens, a long tail cut at 1 M) and leave in the order of their ends;
whenever more than `fill` of the pool is owned, requests end before the next one comes. Reported over the last half:
mean pages of an extent, requests in one extent, share of pages outside their request's longest extent, requests that
did not fit although enough pages were free, time of one allocation (median, 99th percentile).
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_service.extent_allocator import Extent, ExtentAllocator

PAGE_TOKENS = 256
MEDIAN_TOKENS = 8192
MOST_TOKENS = 1 << 20
# A request of n tokens stays this many seconds at a thousand tokens.
SECONDS_A_THOUSAND = 2.0


class Pool(Protocol):
    used: int

    def take(self, count: int) -> Sequence[Extent] | None: ...

    def release(self, extents: Sequence[Extent]) -> None: ...


class Extents:
    """Ours."""

    def __init__(self, pages: int) -> None:
        self._pool = ExtentAllocator("bench", pages)

    @property
    def used(self) -> int:
        return self._pool.used

    def take(self, count: int) -> Sequence[Extent] | None:
        return self._pool.take_extents(count)

    def release(self, extents: Sequence[Extent]) -> None:
        self._pool.release([page for e in extents for page in range(e.first, e.end)])


class FreeList:
    """A stack of single pages, as the known implementations pop slots."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))[::-1]
        self.used = 0

    def take(self, count: int) -> Sequence[Extent] | None:
        if count > len(self._free):
            return None
        self.used += count
        taken, self._free[-count:] = self._free[-count:][::-1], []
        return _extents(taken)

    def release(self, extents: Sequence[Extent]) -> None:
        pages = [page for e in extents for page in range(e.first, e.end)]
        self._free.extend(reversed(pages))
        self.used -= len(pages)


class Buddy:
    """Powers of two; a request is cut into the bits of its size, largest first."""

    def __init__(self, pages: int) -> None:
        self._free: list[set[int]] = [set() for _ in range(pages.bit_length())]
        self.used = 0
        start = 0
        for order in range(pages.bit_length() - 1, -1, -1):
            if pages >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def take(self, count: int) -> Sequence[Extent] | None:
        found: list[Extent] = []
        for order in range(count.bit_length() - 1, -1, -1):
            if count >> order & 1:
                first = self._block(order)
                if first is None:
                    self._give_back(found)
                    return None
                found.append(Extent(first, 1 << order))
        self.used += count
        return found

    def release(self, extents: Sequence[Extent]) -> None:
        self._give_back(extents)
        self.used -= sum(extent.count for extent in extents)

    def _block(self, order: int) -> int | None:
        above = next((o for o in range(order, len(self._free)) if self._free[o]), None)
        if above is None:
            return None
        first = self._free[above].pop()
        while above > order:
            above -= 1
            self._free[above].add(first + (1 << above))
        return first

    def _give_back(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            first, order = extent.first, extent.count.bit_length() - 1
            while order + 1 < len(self._free) and first ^ 1 << order in self._free[order]:
                self._free[order].remove(first ^ 1 << order)
                first &= ~(1 << order)
                order += 1
            self._free[order].add(first)


def _extents(pages: Sequence[int]) -> list[Extent]:
    found: list[Extent] = []
    begin = 0
    for place in range(1, len(pages) + 1):
        if place == len(pages) or pages[place] != pages[place - 1] + 1:
            found.append(Extent(pages[begin], place - begin))
            begin = place
    return found


@dataclass
class Found:
    refused: int = 0
    hours: float = 0.0


def replay(
    pool: Pool, pages: int, requests: int, fill: float, seed: int
) -> tuple[Found, list[float], list[float], list[float]]:
    """What was found, and over the last half: microseconds, pages of an extent, scattered share, one a request."""
    rng = random.Random(seed)
    found = Found()
    living: list[tuple[float, int, Sequence[Extent]]] = []
    now = 0.0
    times: list[float] = []
    lengths: list[float] = []
    scattered: list[float] = []
    for index in range(requests):
        tokens = min(MOST_TOKENS, int(rng.lognormvariate(math.log(MEDIAN_TOKENS), 1.5)) + 64)
        count = -(-tokens // PAGE_TOKENS)
        while living and pool.used + count > fill * pages:
            now, _, extents = heapq.heappop(living)
            pool.release(extents)
        begun = time.perf_counter()
        taken = pool.take(count)
        spent = time.perf_counter() - begun
        if taken is None:
            found.refused += 1
            continue
        heapq.heappush(living, (now + rng.expovariate(1) * SECONDS_A_THOUSAND * tokens / 1000, index, taken))
        if index >= requests // 2:
            merged = _extents([page for e in taken for page in range(e.first, e.end)])
            times.append(spent * 1e6)
            lengths.append(count / len(merged))
            scattered.append(1 - max(e.count for e in merged) / count)
    found.hours = now / 3600
    return found, times, lengths, scattered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pages", type=int, default=262144)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--fill", type=float, default=0.9)
    arguments = parser.parse_args()
    kinds: dict[str, Callable[[int], Pool]] = {"extents": Extents, "free list": FreeList, "buddy": Buddy}
    print(f"{arguments.pages} pages, {arguments.requests} requests, {arguments.fill:.0%} full")
    heads = f"{'refused':>9}{'us median':>11}{'us p99':>9}{'hours':>8}"
    print(f"{'':<12}{'pages an extent':>16}{'whole':>9}{'scattered':>11}{heads}")
    for name, kind in kinds.items():
        found, times, lengths, scattered = replay(
            kind(arguments.pages), arguments.pages, arguments.requests, arguments.fill, 1
        )
        times.sort()
        print(
            f"{name:<12}{statistics.mean(lengths):>16.1f}{sum(s == 0 for s in scattered) / len(scattered):>9.1%}"
            f"{statistics.mean(scattered):>11.2%}{found.refused:>9}{statistics.median(times):>11.1f}"
            f"{times[int(len(times) * 0.99)]:>9.1f}{found.hours:>8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
