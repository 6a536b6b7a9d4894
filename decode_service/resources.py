"""All memory of a request: reserved at once for prompt and output, given back at once, exactly once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from common.kv.layout import host_page_count, logical_page_count
from decode_service.device_pools import DevicePools
from decode_service.extent_allocator import ExtentAllocator, Fragmentation
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.page_allocator import PageAllocator
from decode_service.staging import StagingPool

Allocator = ExtentAllocator | PageAllocator


@dataclass(frozen=True)
class RequestResources:
    """host_pages and logical_pages are ids of two different pools, in the order of the request's tokens, never changed;
    staging_pages those of a third, for the prompt alone, with staged admission."""

    host_pages: Sequence[int]
    logical_pages: Sequence[int]
    window_slot: int
    state_slot: int
    hot_slot: int
    staging_pages: Sequence[int] = ()


@dataclass(frozen=True)
class PoolUse:
    name: str
    total: int
    free: int
    used: int
    quarantined: int


class ResourcePools:
    """Used by the engine's thread; the counts may be read from any."""

    def __init__(
        self,
        host: DeepSeekV4PagedHostPool,
        device: DevicePools,
        hot_slots: PageAllocator,
        staging: StagingPool | None = None,
    ) -> None:
        """With `staging`, prompts land there and admission is staged."""
        self._host = host.allocator
        self._device = device
        self._hot = hot_slots
        self._staging = staging.allocator if staging is not None else None
        self._allocators = [self._host, device.logical, device.window_slots, device.state_slots, hot_slots]
        if self._staging is not None:
            self._allocators.append(self._staging)

    def fits_ever(self, tokens: int, prompt_tokens: int = 0) -> bool:
        """Whether a request of `tokens` tokens in all, `prompt_tokens` of them its prompt, fits empty pools."""
        return (
            host_page_count(tokens) <= self._host.total
            and logical_page_count(tokens) <= self._device.logical.total
            and (self._staging is None or host_page_count(prompt_tokens) <= self._staging.total)
        )

    def reserve(self, tokens: int, prompt_tokens: int = 0) -> RequestResources | None:
        """Everything that a request of `tokens` tokens in all, `prompt_tokens` of them its prompt, will need, its
        state slot cleared; None, and nothing taken, when a pool is short."""
        needs = [
            (self._host, host_page_count(tokens)),
            (self._device.logical, logical_page_count(tokens)),
            (self._device.window_slots, 1),
            (self._device.state_slots, 1),
            (self._hot, 1),
        ]
        if self._staging is not None:
            needs.append((self._staging, host_page_count(prompt_tokens)))
        # Without a page taken: those who wait are tried again before every step.
        if any(allocator.free < count for allocator, count in needs):
            return None
        taken: list[tuple[Allocator, list[int]]] = []
        for allocator, count in needs:
            pages = allocator.take(count)
            if pages is None:
                for other, ids in taken:
                    other.release(ids)
                return None
            taken.append((allocator, pages))
        host, logical, window, state, hot, *staging = (ids for _, ids in taken)
        self._device.clear_state(state[0])
        landing = _page_list(staging[0]) if staging else ()
        return RequestResources(_page_list(host), _page_list(logical), window[0], state[0], hot[0], landing)

    def release_staging(self, resources: RequestResources) -> RequestResources:
        """The prompt is on the host: gives its staging pages back; what the request holds from now on."""
        if self._staging is not None:
            self._staging.release(resources.staging_pages)
        return replace(resources, staging_pages=())

    def release(self, resources: RequestResources) -> None:
        """Raises ValueError when any of it is not owned (a second release)."""
        for allocator, ids in self._parts(resources):
            allocator.release(ids)

    def quarantine(self, resources: RequestResources) -> None:
        """A writer may still be alive: set everything aside."""
        for allocator, ids in self._parts(resources):
            allocator.quarantine(ids)

    def release_quarantined(self, resources: RequestResources) -> None:
        for allocator, ids in self._parts(resources):
            allocator.release_quarantined(ids)

    def use(self) -> list[PoolUse]:
        return [PoolUse(a.name, a.total, a.free, a.used, a.quarantined) for a in self._allocators]

    def fragmentation(self) -> dict[str, Fragmentation]:
        """Of the pools that give extents, by name."""
        return {a.name: a.fragmentation() for a in self._allocators if isinstance(a, ExtentAllocator)}

    def check_integrity(self, held: Iterable[RequestResources], set_aside: Iterable[RequestResources] = ()) -> None:
        """Raises ValueError unless the pools are sound, exactly `held` is owned and `set_aside` quarantined."""
        owned, quarantined = list(held), list(set_aside)
        for index, allocator in enumerate(self._allocators):
            allocator.check_integrity()
            allocator.check_holders(
                [page for resources in owned for page in self._parts(resources)[index][1]],
                [page for resources in quarantined for page in self._parts(resources)[index][1]],
            )

    def _parts(self, resources: RequestResources) -> list[tuple[Allocator, list[int]]]:
        parts: list[tuple[Allocator, list[int]]] = [
            (self._host, list(resources.host_pages)),
            (self._device.logical, list(resources.logical_pages)),
            (self._device.window_slots, [resources.window_slot]),
            (self._device.state_slots, [resources.state_slot]),
            (self._hot, [resources.hot_slot]),
        ]
        if self._staging is not None:
            parts.append((self._staging, list(resources.staging_pages)))
        return parts


def _page_list(pages: Sequence[int]) -> Sequence[int]:
    """Four bytes a page: a tuple of integers takes 36, which is 147 KB for the 4 096 pages of a million tokens."""
    return array("i", pages)
