"""The prefix cache: who finds what, what is given up, and that every page is in one place whatever happens."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.kernels.cpu import cpu_kernels
from common.kv.layout import host_page_count
from common.kv.prefix import chain_seed, first_links
from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from decode_service.device_pools import DevicePools
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.page_allocator import PageAllocator
from decode_service.prefix_cache import PrefixCache
from decode_service.resources import RequestResources, ResourcePools

# No layer keeps rows: the books are those of a pool with memory behind them.
CONFIG = ModelConfig.from_dict(small_config(compress_ratios=[0], num_hidden_layers=1, num_nextn_predict_layers=0))
SEED = chain_seed("model", "tokenizer")
PAGE = 256


class Pools:
    def __init__(self, pages: int = 8, slots: int = 4, shuffle: int | None = 3) -> None:
        self.host = DeepSeekV4PagedHostPool([], pages, cpu_kernels(), shuffle)
        self.device = DevicePools.of(CONFIG, pages, slots, shuffle)
        self.prefix = PrefixCache(self.host.allocator, self.device.logical, SEED)
        self.pools = ResourcePools(self.host, self.device, PageAllocator("hot", slots), None, self.prefix)

    def reserve(self, tokens: list[int], output: int = 4) -> RequestResources | None:
        return self.pools.reserve(len(tokens) + output, len(tokens), self.prefix.chain(tokens))

    def run(self, tokens: list[int], output: int = 4) -> RequestResources:
        """A whole life: reserved, finished, full pages kept."""
        resources = self.reserve(tokens, output)
        assert resources is not None
        self.pools.release(resources, self.prefix.chain(tokens))
        return resources

    def cached(self) -> tuple[int, int, int]:
        """free, used and cached pages of the host pool."""
        (use,) = [use for use in self.pools.use() if use.name == "host_c4"]
        return use.free, use.used, use.cached


def text(seed: int, pages: float) -> list[int]:
    return random.Random(seed).choices(range(1000), k=int(pages * PAGE))


def test_the_next_turn_gets_the_same_pages_without_a_copy_and_reserves_only_new_ones():
    pools = Pools()
    first = pools.run(text(1, 2.5))
    assert pools.cached() == (6, 0, 2)
    second = pools.reserve([*text(1, 2.5), *text(2, 1)])
    assert second is not None
    assert list(second.host_pages[:2]) == list(first.host_pages[:2])
    assert list(second.logical_pages[:2]) == list(first.logical_pages[:2])
    assert len(second.prefix) == 2
    assert pools.cached() == (4, 4, 0)
    pools.pools.check_integrity([second])


def test_two_requests_share_pages_and_the_last_one_lets_them_go():
    pools = Pools()
    pools.run(text(1, 2))
    one, two = pools.reserve(text(1, 2)), pools.reserve(text(1, 2))
    assert one is not None
    assert two is not None
    assert pools.cached() == (4, 4, 0)
    pools.pools.check_integrity([one, two])
    pools.pools.release(one)
    assert pools.cached() == (5, 3, 0)
    assert pools.prefix.clear() == 0
    pools.pools.check_integrity([two])
    pools.pools.release(two)
    assert pools.cached() == (6, 0, 2)
    pools.pools.check_integrity([])


def test_the_same_prompt_twice_at_once_is_kept_once():
    pools = Pools()
    one, two = pools.reserve(text(1, 2)), pools.reserve(text(1, 2))
    assert one is not None
    assert two is not None
    for each in (one, two):
        pools.pools.release(each, pools.prefix.chain(text(1, 2)))
    assert pools.cached() == (6, 0, 2)
    pools.pools.check_integrity([])


def test_what_is_not_to_be_kept_is_free_at_once():
    pools = Pools()
    resources = pools.reserve(text(1, 3))
    assert resources is not None
    pools.pools.release(resources)
    assert pools.cached() == (8, 0, 0)


def test_least_recently_used_leaves_go_first():
    pools = Pools()
    pools.run(text(1, 3))
    pools.run(text(2, 3))
    pools.run([*text(1, 3)[: 2 * PAGE]])  # touches the first two pages of text 1
    assert pools.cached() == (2, 0, 6)
    pools.run(text(3, 2), output=PAGE)  # needs 3: the last page of text 1 goes, for it is the oldest
    found = [len(pools.prefix.match(pools.prefix.chain(text(which, 3)))) for which in (1, 2)]
    assert found == [2, 3]
    pools.run(text(4, 3))
    found = [len(pools.prefix.match(pools.prefix.chain(text(which, 3)))) for which in (1, 2)]
    assert found == [2, 0]


def test_pages_in_use_are_never_given_up_and_a_request_that_lacks_them_takes_nothing():
    pools = Pools()
    pools.run(text(1, 3))
    user = pools.reserve(text(1, 3), output=PAGE)
    assert user is not None
    before = pools.cached()
    assert pools.reserve(text(2, 5)) is None
    assert pools.cached() == before == (4, 4, 0)
    pools.run(text(5, 2))
    assert pools.reserve(text(2, 4)) is None
    assert len(pools.prefix.match(pools.prefix.chain(text(5, 2)))) == 2, "given up for nothing"
    pools.pools.check_integrity([user])


def test_a_pool_full_of_cached_pages_takes_any_request_that_an_empty_one_would():
    pools = Pools()
    for which in range(8):
        pools.run(text(which, 1))
    assert pools.cached()[1:] == (0, 7)
    assert pools.reserve(text(9, 7.5)) is not None


def test_a_quarantined_request_sets_only_its_own_pages_aside():
    pools = Pools()
    pools.run(text(1, 2))
    resources = pools.reserve([*text(1, 2), *text(2, 1)])
    assert resources is not None
    pools.pools.quarantine(resources)
    (use,) = [use for use in pools.pools.use() if use.name == "host_c4"]
    assert (use.free, use.used, use.cached, use.quarantined) == (4, 0, 2, 2)
    pools.pools.check_integrity([], [resources])
    pools.pools.release_quarantined(resources)
    assert pools.cached() == (6, 0, 2)


def test_the_integrity_check_finds_a_page_that_nobody_counts():
    pools = Pools()
    pools.run(text(1, 2))
    pools.prefix.pages()[0].users += 1
    with pytest.raises(ValueError, match="pool host_c4: requests name 1 owned pages, 0 are"):
        pools.pools.check_integrity([])


def test_a_chain_longer_than_the_pages_is_refused():
    pools = Pools()
    resources = pools.reserve(text(1, 1))
    assert resources is not None
    with pytest.raises(ValueError, match="5 pages to keep of 2 host and 2 logical pages"):
        pools.pools.release(resources, pools.prefix.chain(text(1, 5)))


@dataclass
class Living:
    tokens: list[int]
    output: int
    resources: RequestResources


class PrefixMachine(RuleBasedStateMachine):
    """Any order of admitting, finishing, aborting, quarantining and flushing, in a pool of seven pages; the model is
    what each page holds."""

    @initialize(shuffle=st.none() | st.integers(0, 3))
    def begin(self, shuffle: int | None) -> None:
        self.rig = Pools(pages=7, slots=3, shuffle=shuffle)
        self.living: list[Living] = []
        self.aside: list[RequestResources] = []
        # What was last written to host and logical pages: the tokens up to and with the page.
        self.content: dict[tuple[str, int], tuple[int, ...]] = {}

    @rule(
        path=st.lists(st.integers(0, 1), min_size=0, max_size=4), extra=st.integers(1, 255), output=st.integers(1, 600)
    )
    def admit(self, path: list[int], extra: int, output: int) -> None:
        """Prompts of few kinds of blocks, so that they meet."""
        tokens = [*(block for block in path for _ in range(PAGE)), *([9] * extra)]
        free = {use.name: use for use in self.rig.pools.use()}
        matched = len(self.rig.prefix.match(self.rig.prefix.chain(tokens)))
        need = host_page_count(len(tokens) + output)
        resources = self.rig.reserve(tokens, output)
        if resources is None:
            short = any(free[name].free == 0 for name in ("window", "state", "hot"))
            assert (
                short
                or need > free["host_c4"].free + free["host_c4"].cached
                or len(tokens) + output > PAGE * (free["logical"].free + free["logical"].cached)
            )
            return
        assert len(resources.prefix) == matched
        for place in range(matched):
            seen = tuple(tokens[: (place + 1) * PAGE])
            assert self.content["host", resources.host_pages[place]] == seen
            assert self.content["logical", resources.logical_pages[place]] == seen
        for name, pages in (("host", resources.host_pages), ("logical", resources.logical_pages)):
            for page in pages[matched:]:
                self.content[name, page] = ()
        self.living.append(Living(tokens, output, resources))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), made=st.integers(0, 600))
    def finish(self, data: st.DataObject, made: int) -> None:
        life = self.living.pop(data.draw(st.integers(0, len(self.living) - 1)))
        seen = [*life.tokens, *([7] * min(made, life.output - 1))]
        chain = self.rig.prefix.chain(seen)
        for place in range(len(life.resources.prefix), len(seen) // PAGE):
            known = tuple(seen[: (place + 1) * PAGE])
            self.content["host", life.resources.host_pages[place]] = known
            self.content["logical", life.resources.logical_pages[place]] = known
        self.rig.pools.release(life.resources, chain)
        assert len(self.rig.prefix.match(chain)) == len(seen) // PAGE

    @precondition(lambda self: self.living)
    @rule(data=st.data(), kept=st.integers(0, 3))
    def abort(self, data: st.DataObject, kept: int) -> None:
        """Nothing, or no more than it began with, is to be kept."""
        life = self.living.pop(data.draw(st.integers(0, len(self.living) - 1)))
        chain = first_links(self.rig.prefix.chain(life.tokens), min(kept, len(life.resources.prefix)))
        self.rig.pools.release(life.resources, chain)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        life = self.living.pop(data.draw(st.integers(0, len(self.living) - 1)))
        self.rig.pools.quarantine(life.resources)
        self.aside.append(life.resources)

    @precondition(lambda self: self.aside)
    @rule()
    def leave_quarantine(self) -> None:
        self.rig.pools.release_quarantined(self.aside.pop())

    @rule()
    def flush(self) -> None:
        cached = self.rig.cached()[2]
        assert self.rig.prefix.clear() == cached

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.pools.check_integrity([life.resources for life in self.living], self.aside)
        for use in self.rig.pools.use():
            assert use.free + use.used + use.quarantined + use.cached == use.total
            if not self.living:
                assert use.used == 0
        report = self.rig.host.allocator.fragmentation()
        assert (report.extents > 0) == (report.owned_pages > 0)


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
