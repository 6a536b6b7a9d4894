"""From budgets in bytes to the sizes of the pools, and from those to the requests that fit: `dsv4-pd plan` and the
decode service's start-up compute it here, so they agree.

    host_kv_budget   >= host pages
    device_kv_budget >= shared + requests x slots + logical pages + staging pages + resident pages and their table

Slots take at most half of the device budget unless their number is given; logical pages take the rest, as far as there
are host pages to go with them; what is left then is for resident C4 pages. Nothing taken ever exceeds a budget, and one
more page would.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.footprint import INT32_BYTES, Footprint
from common.kv.layout import C4_PAGE, LOGICAL_PAGE_TOKENS, host_page_count, logical_page_count
from common.quantities import show_bytes

# What is sized when nothing is said and memory is everybody's (no GPU), and the most requests without a number given.
DEFAULT_PAGES = 4096
DEFAULT_REQUESTS = 64
DEFAULT_RESIDENT_PAGES = 1024
# Kept free of what there is in all: activations, graphs, kernels, allocators' slack; on the host everything else;
# without a GPU, where pools are small, computing alone.
DEVICE_RESERVE_BYTES = 6 << 30
HOST_RESERVE_BYTES = 16 << 30
CPU_RESERVE_BYTES = 1 << 30
# Lengths of requests that people compare, in tokens.
LENGTHS = (8192, 32768, 131072, 262144, 1 << 20)


class SizingError(ValueError):
    """Pools can't be made from these budgets; the message has the budget, and the bytes needed."""


@dataclass(frozen=True)
class Budget:
    """Bytes for KV, and where the number is from, for messages. `most_pages` bounds what is derived from it (a budget
    taken from free memory is no reason to fill it with pages that no request can use), `most_resident` the resident
    ones among them; 0 = unbounded."""

    size: int
    source: str
    most_pages: int = 0
    most_resident: int = 0


@dataclass(frozen=True)
class Counts:
    """Pages and slots as they are given, 0 = to be derived; resident_pages: None = to be derived."""

    host_pages: int = 0
    logical_pages: int = 0
    requests: int = 0
    staging_pages: int = 0
    resident_pages: int | None = None


@dataclass(frozen=True)
class PoolSizes:
    """Pages and slots, and the bytes that they take. staging_pages: 0 without staged admission."""

    host_pages: int
    logical_pages: int
    requests: int
    staging_pages: int
    resident_pages: int
    host_bytes: int
    device_bytes: int

    def most_tokens(self) -> int:
        """Of the longest request that fits when it is alone."""
        return min(self.host_pages, self.logical_pages) * LOGICAL_PAGE_TOKENS

    def fits(self, tokens: int) -> dict[str, int]:
        """Requests of `tokens` tokens that each pool holds; "slots" whatever the length. Staging holds prompts."""
        found = {"slots": self.requests, "logical": self.logical_pages // max(1, logical_page_count(tokens))}
        pages = host_page_count(tokens)
        if pages:
            found["host_c4"] = self.host_pages // pages
            if self.staging_pages:
                found["staging"] = self.staging_pages // pages
        return found

    def most_requests(self, tokens: int) -> int:
        """That are held at a time. A staging pool is passed through, and holds none."""
        return min(count for pool, count in self.fits(tokens).items() if pool != "staging")


def free_budget(total: int, left: int, most_reserve: int, share: int = 1) -> int:
    """Bytes for KV of memory that has `left` of `total` bytes free: less a reserve of `most_reserve`, at most a quarter
    of the total; divided by `share` users."""
    return max(0, left - min(most_reserve, total // 4)) // share


def host_pool_bytes(footprint: Footprint, pages: int, page_locked: bool) -> int:
    """A layer's buffer is one allocation; torch takes page-locked ones in powers of two."""
    layers = footprint.host_page // C4_PAGE.page_bytes
    size = pages * C4_PAGE.page_bytes
    return layers * (1 << (size - 1).bit_length() if page_locked and size else size)


def size_pools(
    footprint: Footprint, host: Budget, device: Budget, given: Counts, tokens: int = LOGICAL_PAGE_TOKENS,
    page_locked: bool = False,
) -> PoolSizes:  # fmt: skip
    """The pools for requests of up to `tokens` tokens and more where the budgets hold more. Counts that are given are
    taken as they are; what is not given is derived from what they leave. `page_locked`: whether the host pool is.

    Raises SizingError when a budget is too small for the counts that are given, or for one request.
    """
    logical_least = given.logical_pages or logical_page_count(tokens)
    fixed = footprint.shared + given.staging_pages * footprint.host_page
    requests = given.requests
    if not requests:
        half = (device.size // 2 - footprint.shared) // footprint.slots
        room = (device.size - fixed - logical_least * footprint.logical_page) // footprint.slots
        requests = max(1, min(DEFAULT_REQUESTS, half, room))
    fixed += requests * footprint.slots
    needed = fixed + logical_least * footprint.logical_page
    if needed > device.size:
        raise SizingError(
            f"{_said(device)} is too small: {_requests(requests)} with {_pages(logical_least, 'logical')}"
            f"{_staging(given)} take {needed} bytes ({show_bytes(needed)}) on the device"
        )
    host_pages = given.host_pages or _host_pages(footprint, host, page_locked)
    host_least = given.host_pages or logical_page_count(tokens)
    needed = host_pool_bytes(footprint, host_least, page_locked)
    if needed > host.size or host_pages < host_least:
        raise SizingError(
            f"{_said(host)} is too small: {_pages(host_least, 'host')} take {needed} bytes ({show_bytes(needed)}) on "
            "the host" + (", where page-locked memory comes in powers of two a layer" if page_locked else "")
        )
    logical = given.logical_pages
    if not logical:
        reserved = resident_bytes(footprint, given.resident_pages or 0, requests, host_pages)
        derived = _derived(device, device.size - fixed - reserved, footprint.logical_page)
        logical = max(logical_least, min(derived, host_pages))
    fixed += logical * footprint.logical_page
    pages = min(host_pages, logical)
    resident = given.resident_pages
    if resident is None:
        left = device.size - fixed - (resident_bytes(footprint, 1, requests, pages) - footprint.host_page)
        resident = max(0, left // footprint.host_page) if footprint.host_page else 0
        resident = min(resident, host_pages, device.most_resident or resident)
    taken = fixed + resident_bytes(footprint, resident, requests, pages)
    if taken > device.size:
        raise SizingError(
            f"{_said(device)} is too small: {_requests(requests)} with {_pages(logical, 'logical')}{_staging(given)} "
            f"and {resident} resident pages take {taken} bytes ({show_bytes(taken)}) on the device"
        )
    host_bytes = host_pool_bytes(footprint, host_pages, page_locked)
    return PoolSizes(host_pages, logical, requests, given.staging_pages, resident, host_bytes, taken)


def resident_bytes(footprint: Footprint, count: int, requests: int, most_pages: int) -> int:
    """Of `count` resident pages and the table of who has which, for requests of up to `most_pages` pages; 0 of none."""
    return count * footprint.host_page + (requests + 1) * most_pages * INT32_BYTES if count else 0


def lengths_up_to(tokens: int) -> tuple[int, ...]:
    """LENGTHS that are less than `tokens`, and `tokens`."""
    return (*(length for length in LENGTHS if length < tokens), tokens)


def _host_pages(footprint: Footprint, host: Budget, page_locked: bool) -> int:
    if not footprint.host_page:
        return host.most_pages or DEFAULT_PAGES
    layer = host.size // (footprint.host_page // C4_PAGE.page_bytes)
    if page_locked and layer:
        layer = 1 << (layer.bit_length() - 1)
    return _derived(host, layer, C4_PAGE.page_bytes)


def _derived(budget: Budget, size: int, page_bytes: int) -> int:
    pages = size // page_bytes if page_bytes else budget.most_pages or DEFAULT_PAGES
    return min(pages, budget.most_pages) if budget.most_pages else pages


def _said(budget: Budget) -> str:
    return f"{budget.source} = {budget.size} bytes ({show_bytes(budget.size)})"


def _requests(count: int) -> str:
    return "one request's slots" if count == 1 else f"slots of {count} requests"


def _pages(count: int, kind: str) -> str:
    return f"{count} {kind} page{'s' if count > 1 else ''} ({count * LOGICAL_PAGE_TOKENS} tokens)"


def _staging(given: Counts) -> str:
    return f" and {given.staging_pages} staging pages" if given.staging_pages else ""
