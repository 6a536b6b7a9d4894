"""Pages of finished requests, kept for requests that begin with the same tokens.

A cached page is one host C4 page and the logical page of the same 256 tokens, found by the link of the hash chain that
ends with it. The pages form a forest: a page is the child of the page before it. Requests hold the pages they begin
with; a page that is held is owned in the allocators, one that nobody holds is cached there. Only leaves that nobody
holds are given up, least recently used first, and only when somebody needs their memory. Since whoever holds a page
holds all before it, every page that nobody holds can be given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sortedcontainers import SortedDict

from common.kv.prefix import extend_chain, first_links, link, link_count, pages_on_host
from decode_service.extent_allocator import ExtentAllocator


@dataclass(slots=True, eq=False)
class CachedPage:
    """users: requests that hold it; children: cached pages right behind it; used: when it was last let go."""

    name: bytes
    parent: CachedPage | None = field(repr=False)
    host_page: int
    logical_page: int
    users: int = 0
    children: int = 0
    used: int = 0


@dataclass(frozen=True)
class PrefixCounters:
    """Since start: requests that found something and that did not, pages they found, pages given up for others."""

    hits: int
    misses: int
    hit_pages: int
    evictions: int


class PrefixCache:
    """Used by the engine's thread; `chain` and the counts may be used from any."""

    def __init__(
        self, host: ExtentAllocator, logical: ExtentAllocator, seed: bytes, *, keeps_output: bool = False
    ) -> None:
        """`seed` is what every chain begins with. `keeps_output`: pages that decode wrote may be kept too. Decode sums
        in another order than prefill, so that single bytes of those differ from what prefill would send."""
        self._host = host
        self._logical = logical
        self._seed = seed
        self._keeps_output = keeps_output
        self._pages: dict[bytes, CachedPage] = {}
        # Leaves that nobody holds, by when they were let go.
        self._leaves: Any = SortedDict()
        self._unheld = 0
        self._clock = 0
        self._hits = self._misses = self._hit_pages = self._evictions = 0

    @property
    def unheld(self) -> int:
        """Pages that nobody holds: what `make_room` can free in each pool."""
        return self._unheld

    @property
    def counters(self) -> PrefixCounters:
        return PrefixCounters(self._hits, self._misses, self._hit_pages, self._evictions)

    def chain(self, token_ids: Sequence[int], known: bytes = b"") -> bytes:
        """The hash chain of all full pages of a sequence, given that of its first ones."""
        return extend_chain(self._seed, known, token_ids)

    def names_to_keep(self, chain: bytes, token_ids: Sequence[int], generated: Sequence[int]) -> bytes:
        """Of a finished request, given its prompt's chain, the names of the pages that may be kept: full, and with all
        their entries on the host. The last generated token was never seen by the model."""
        if not self._keeps_output:
            return chain
        seen = [*token_ids, *generated[:-1]]
        return first_links(self.chain(seen, chain), pages_on_host(len(token_ids), len(seen)))

    def match(self, chain: bytes) -> list[CachedPage]:
        """The cached pages that a sequence begins with, in order; nothing is held yet."""
        found: list[CachedPage] = []
        for place in range(link_count(chain)):
            page = self._pages.get(link(chain, place))
            if page is None:
                break
            found.append(page)
        return found

    def hold(self, pages: Sequence[CachedPage]) -> None:
        """A request begins with these pages (what `match` gave): none is given up until it lets go."""
        if pages:
            self._hits += 1
            self._hit_pages += len(pages)
        else:
            self._misses += 1
        for page in pages:
            page.users += 1
        first_held = [page for page in pages if page.users == 1]
        for page in first_held:
            self._leaves.pop(page.used, None)
        self._unheld -= len(first_held)
        self._host.reuse([page.host_page for page in first_held])
        self._logical.reuse([page.logical_page for page in first_held])

    def let_go(self, held: Sequence[CachedPage]) -> None:
        """A request that held these pages is over."""
        over = [page for page in held if page.users == 1]
        self._host.cache([page.host_page for page in over])
        self._logical.cache([page.logical_page for page in over])
        for page in held:
            page.users -= 1
        self._rest(over)

    def keep(
        self, chain: bytes, held: Sequence[CachedPage], host_pages: Sequence[int], logical_pages: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """A request that held `held` is over; its own full pages, which it owns and which lie behind those, are kept
        under the names of `chain`. Returns the host and logical pages that were not kept, as another request's with
        the same content are cached already: they are the caller's to release."""
        own = link_count(chain) - len(held)
        if own > min(len(host_pages), len(logical_pages)) or own < 0:
            raise ValueError(f"{own} pages to keep of {len(host_pages)} host and {len(logical_pages)} logical pages")
        kept: list[CachedPage] = []
        twice: list[int] = []
        parent = held[-1] if held else None
        for place in range(own):
            name = link(chain, len(held) + place)
            page = self._pages.get(name)
            if page is None:
                page = CachedPage(name, parent, host_pages[place], logical_pages[place])
                self._pages[name] = page
                if parent is not None:
                    parent.children += 1
                    self._leaves.pop(parent.used, None)
                kept.append(page)
            else:
                twice.append(place)
            parent = page
        self._host.cache([page.host_page for page in kept])
        self._logical.cache([page.logical_page for page in kept])
        self._rest(kept)
        self.let_go(held)
        return [host_pages[place] for place in twice], [logical_pages[place] for place in twice]

    def make_room(self, host_pages: int, logical_pages: int) -> bool:
        """Gives up pages until so many are free in both pools; gives none up, and returns False, when they can't be."""
        lacking = max(host_pages - self._host.free, logical_pages - self._logical.free)
        if lacking > self._unheld:
            return False
        self._give_up(max(0, lacking))
        return True

    def clear(self) -> int:
        """Gives up every page that nobody holds; returns how many."""
        count = self._unheld
        self._give_up(count)
        return count

    def check_integrity(self, held: Iterable[Sequence[CachedPage]]) -> None:
        """Raises ValueError unless users, children and leaves are what pages and requests (what each holds) say."""
        users: dict[bytes, int] = {}
        children: dict[bytes, int] = {}
        for pages in held:
            for page in pages:
                users[page.name] = users.get(page.name, 0) + 1
                if self._pages.get(page.name) is not page:
                    raise ValueError(f"prefix cache: a request holds host page {page.host_page}, which is not cached")
        for page in self._pages.values():
            if page.parent is not None:
                children[page.parent.name] = children.get(page.parent.name, 0) + 1
                if self._pages.get(page.parent.name) is not page.parent or page.users > page.parent.users:
                    raise ValueError(f"prefix cache: host page {page.host_page} lacks the page before it")
        leaves: dict[int, CachedPage] = {}
        for page in self._pages.values():
            said = page.users, page.children
            found = users.get(page.name, 0), children.get(page.name, 0)
            if said != found:
                raise ValueError(
                    f"prefix cache: host page {page.host_page} says {said} users and children, are {found}"
                )
            if said == (0, 0):
                leaves[page.used] = page
        if leaves != dict(self._leaves) or self._unheld != sum(page.users == 0 for page in self._pages.values()):
            raise ValueError(f"prefix cache: {len(self._leaves)} leaves of {len(leaves)}, {self._unheld} pages unheld")

    def pages(self) -> list[CachedPage]:
        """All of them, for integrity checks and tests."""
        return list(self._pages.values())

    def _rest(self, pages: Sequence[CachedPage]) -> None:
        """Nobody holds these any more. Later pages of a sequence count as older: they go first."""
        for page in reversed(pages):
            self._clock += 1
            page.used = self._clock
            if page.children == 0:
                self._leaves[page.used] = page
        self._unheld += len(pages)

    def _give_up(self, count: int) -> None:
        gone: list[CachedPage] = []
        while len(gone) < count:
            _, page = self._leaves.popitem(0)
            del self._pages[page.name]
            parent = page.parent
            if parent is not None:
                parent.children -= 1
                if parent.users == 0 and parent.children == 0:
                    self._leaves[parent.used] = parent
            gone.append(page)
        self._unheld -= len(gone)
        self._evictions += len(gone)
        # In order, so that neighbours come back as one run.
        self._host.release_cached(sorted(page.host_page for page in gone))
        self._logical.release_cached(sorted(page.logical_page for page in gone))
