"""All memory of a request: reserved at once for prompt and output, given back at once, exactly once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from common.kv.layout import host_page_count, logical_page_count
from common.kv.prefix import link_count
from decode_service.device_pools import DevicePools
from decode_service.extent_allocator import ExtentAllocator, Fragmentation
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.page_allocator import PageAllocator
from decode_service.prefix_cache import CachedPage, PrefixCache
from decode_service.staging import StagingPool

Allocator = ExtentAllocator | PageAllocator


@dataclass(frozen=True)
class RequestResources:
    """host_pages and logical_pages are ids of two different pools, in the order of the request's tokens, never changed;
    staging_pages those of a third, for the part of the prompt that prefill sends, with staged admission. Both page
    lists begin with those of `prefix`, which the request shares with others and never writes; the rest is its own."""

    host_pages: Sequence[int]
    logical_pages: Sequence[int]
    window_slot: int
    state_slot: int
    hot_slot: int
    staging_pages: Sequence[int] = ()
    prefix: Sequence[CachedPage] = ()


@dataclass(frozen=True)
class PoolUse:
    """Each item is one of the four. cached: kept of finished requests and used by nobody, given up when needed."""

    name: str
    total: int
    free: int
    used: int
    quarantined: int
    cached: int = 0


class ResourcePools:
    """Used by the engine's thread; the counts may be read from any."""

    def __init__(
        self,
        host: DeepSeekV4PagedHostPool,
        device: DevicePools,
        hot_slots: PageAllocator,
        staging: StagingPool | None = None,
        prefix: PrefixCache | None = None,
        resident: PageAllocator | None = None,
    ) -> None:
        """With `staging`, prompts land there and admission is staged; with `prefix`, full pages of finished requests
        are kept for others. `resident`: HiSparse's pages, for `use` alone."""
        self.prefix = prefix
        self._host = host.allocator
        self._device = device
        self._hot = hot_slots
        self._staging = staging.allocator if staging is not None else None
        self._allocators = [self._host, device.logical, device.window_slots, device.state_slots, hot_slots]
        if self._staging is not None:
            self._allocators.append(self._staging)
        # Nothing of it is reserved: HiSparse shares it out.
        self._shared_out = [resident] if resident is not None and resident.total else []

    def fits_ever(self, tokens: int, prompt_tokens: int = 0) -> bool:
        """Whether a request of `tokens` tokens in all, `prompt_tokens` of them its prompt, fits empty pools."""
        return (
            host_page_count(tokens) <= self._host.total
            and logical_page_count(tokens) <= self._device.logical.total
            and (self._staging is None or host_page_count(prompt_tokens) <= self._staging.total)
        )

    def reserve(self, tokens: int, prompt_tokens: int = 0, chain: bytes = b"") -> RequestResources | None:
        """Everything that a request of `tokens` tokens in all, `prompt_tokens` of them its prompt, will need, its
        state slot cleared; None, and nothing taken, when a pool is short. `chain` names the prompt's full pages: the
        first ones may be cached. Cached pages of others are given up for what is not free."""
        shared = self.prefix.match(chain) if self.prefix is not None else []
        needs = [
            (self._host, host_page_count(tokens) - len(shared)),
            (self._device.logical, logical_page_count(tokens) - len(shared)),
            (self._device.window_slots, 1),
            (self._device.state_slots, 1),
            (self._hot, 1),
        ]
        if self._staging is not None:
            needs.append((self._staging, host_page_count(prompt_tokens) - len(shared)))
        # Without a page taken: those who wait are tried again before every step.
        if not self._make_room(needs, shared):
            return None
        taken: list[tuple[Allocator, list[int]]] = []
        for allocator, count in needs:
            pages = allocator.take(count)
            if pages is None:
                for other, ids in taken:
                    other.release(ids)
                if self.prefix is not None:
                    self.prefix.let_go(shared)
                return None
            taken.append((allocator, pages))
        host, logical, window, state, hot, *staging = (ids for _, ids in taken)
        self._device.clear_state(state[0])
        landing = _page_list(staging[0]) if staging else ()
        return RequestResources(
            _page_list([*(page.host_page for page in shared), *host]),
            _page_list([*(page.logical_page for page in shared), *logical]),
            window[0], state[0], hot[0], landing, shared,
        )  # fmt: skip

    def _make_room(self, needs: Sequence[tuple[Allocator, int]], shared: Sequence[CachedPage]) -> bool:
        """Holds `shared` and gives up cached pages for `needs`; does neither, and returns False, where that is not
        enough."""
        unheld = self.prefix.unheld - sum(page.users == 0 for page in shared) if self.prefix is not None else 0
        for allocator, count in needs:
            available = allocator.free + (unheld if allocator in (self._host, self._device.logical) else 0)
            if count > available:
                return False
        if self.prefix is None:
            return True
        self.prefix.hold(shared)
        return self.prefix.make_room(needs[0][1], needs[1][1])

    def release_staging(self, resources: RequestResources) -> RequestResources:
        """The prompt is on the host: gives its staging pages back; what the request holds from now on."""
        if self._staging is not None:
            self._staging.release(resources.staging_pages)
        return replace(resources, staging_pages=())

    def release(self, resources: RequestResources, chain: bytes = b"") -> None:
        """Gives it back; the first pages, those that `chain` names, are kept as cached ones. Raises ValueError when any
        of it is not owned (a second release)."""
        host, logical, *slots = self._parts(resources)
        for allocator, ids in slots:
            allocator.release(ids)
        kept, twice = 0, (list[int](), list[int]())
        if self.prefix is not None:
            kept = max(0, link_count(chain) - len(resources.prefix))
            if kept:
                twice = self.prefix.keep(chain, resources.prefix, host[1], logical[1])
            else:
                self.prefix.let_go(resources.prefix)
        for (allocator, ids), again in zip((host, logical), twice, strict=True):
            allocator.release([*again, *ids[kept:]])

    def quarantine(self, resources: RequestResources) -> None:
        """A writer may still be alive: set everything aside."""
        for allocator, ids in self._parts(resources):
            allocator.quarantine(ids)
        if self.prefix is not None:
            # No writer was told where these are.
            self.prefix.let_go(resources.prefix)

    def release_quarantined(self, resources: RequestResources) -> None:
        for allocator, ids in self._parts(resources):
            allocator.release_quarantined(ids)

    def use(self) -> list[PoolUse]:
        return [
            PoolUse(a.name, a.total, a.free, a.used, a.quarantined, a.cached if isinstance(a, ExtentAllocator) else 0)
            for a in [*self._allocators, *self._shared_out]
        ]

    def fragmentation(self) -> dict[str, Fragmentation]:
        """Of the pools that give extents, by name."""
        return {a.name: a.fragmentation() for a in self._allocators if isinstance(a, ExtentAllocator)}

    def check_integrity(self, held: Iterable[RequestResources], set_aside: Iterable[RequestResources] = ()) -> None:
        """Raises ValueError unless the pools are sound, exactly `held` is owned and `set_aside` quarantined."""
        owned, quarantined = list(held), list(set_aside)
        pages = self.prefix.pages() if self.prefix is not None else []
        for index, allocator in enumerate(self._allocators):
            allocator.check_integrity()
            named = [page for resources in owned for page in self._parts(resources)[index][1]]
            aside = [page for resources in quarantined for page in self._parts(resources)[index][1]]
            if isinstance(allocator, PageAllocator):
                allocator.check_holders(named, aside)
                continue
            kept = [(page.host_page if allocator is self._host else page.logical_page, page.users) for page in pages]
            named += [page for page, users in kept if users]
            allocator.check_holders(named, aside, [page for page, users in kept if not users])
        if self.prefix is not None:
            self.prefix.check_integrity(resources.prefix for resources in owned)

    def _parts(self, resources: RequestResources) -> list[tuple[Allocator, list[int]]]:
        """Of each pool what is the request's own, host and logical pages first."""
        shared = len(resources.prefix)
        parts: list[tuple[Allocator, list[int]]] = [
            (self._host, list(resources.host_pages[shared:])),
            (self._device.logical, list(resources.logical_pages[shared:])),
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
