"""Allocator, host pool and resources: taken and given back exactly once, whatever happens."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.kernels.cpu import cpu_kernels
from common.kv.layout import C4_PAGE
from common.model.config import ModelConfig
from common.model.kv_store import CacheKind
from common.model.small_checkpoint import small_config
from decode_service.device_pools import DevicePools
from decode_service.hisparse import HiSparseCoordinator
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.page_allocator import PageAllocator
from decode_service.resources import RequestResources, ResourcePools

CONFIG = ModelConfig.from_dict(small_config())
KERNELS = cpu_kernels()


def make_pools(
    pages: int = 12, logical: int = 10, slots: int = 3, seed: int | None = 5
) -> tuple[ResourcePools, DevicePools]:
    host = DeepSeekV4PagedHostPool(CONFIG.layers_of(4), pages, KERNELS, seed)
    device = DevicePools.of(CONFIG, logical, slots, seed)
    hisparse = HiSparseCoordinator(host, KERNELS, slots, CONFIG.index_topk, seed)
    return ResourcePools(host, device, hisparse.slots), device


def test_shuffled_allocators_hand_out_ids_that_differ_between_pools():
    host, logical = PageAllocator("host_c4", 200, 3), PageAllocator("logical", 200, 3)
    first, second = host.take(50), logical.take(50)
    assert first != second
    assert first != sorted(first or [])


def test_taking_too_many_takes_nothing():
    pool = PageAllocator("p", 4)
    assert pool.take(5) is None
    assert (pool.free, pool.used) == (4, 0)
    assert pool.take(4) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="-1 pages asked for"):
        pool.take(-1)


@pytest.mark.parametrize(
    ("pages", "message"), [([0, 0], "names a page twice"), ([3], "page 3 is not owned"), ([9], "page 9 is not owned")]
)
def test_a_wrong_release_gives_nothing_back(pages: list[int], message: str):
    pool = PageAllocator("p", 4)
    pool.take(2)
    with pytest.raises(ValueError, match=message):
        pool.release(pages)
    assert (pool.free, pool.used) == (2, 2)
    pool.check_integrity()


def test_a_double_release_is_refused():
    pool = PageAllocator("p", 4)
    taken = pool.take(2) or []
    pool.release(taken)
    with pytest.raises(ValueError, match="is not owned"):
        pool.release(taken)
    pool.check_integrity()


def test_quarantined_pages_are_neither_free_nor_owned():
    pool = PageAllocator("p", 2)
    taken = pool.take(2) or []
    pool.quarantine(taken)
    assert (pool.free, pool.used, pool.quarantined) == (0, 0, 2)
    assert pool.take(1) is None
    with pytest.raises(ValueError, match="not owned"):
        pool.release(taken)
    pool.release_quarantined(taken)
    assert pool.free == 2
    pool.check_integrity()


def test_a_request_that_fits_one_pool_but_not_another_leaves_both_untouched():
    pools, _ = make_pools(pages=12, logical=3)
    assert pools.reserve(4 * 256) is None
    assert all(use.free == use.total for use in pools.use())
    assert not pools.fits_ever(4 * 256)
    assert pools.fits_ever(3 * 256)


def test_an_empty_pool_reports_nothing_used():
    pools, _ = make_pools()
    assert all((use.used, use.quarantined, use.free) == (0, 0, use.total) for use in pools.use())


def test_a_reserved_state_slot_is_cleared_of_what_the_last_request_left():
    pools, device = make_pools(slots=1)
    state = device.states[1, CacheKind.C4]
    state.fill_(7)
    resources = pools.reserve(10)
    assert resources is not None
    half = state.shape[2] // 2
    assert (state[resources.state_slot, :, :half] == 0).all()
    assert torch.isneginf(state[resources.state_slot, :, half:]).all()


class HostRowChecks:
    pool = DeepSeekV4PagedHostPool([1], 2, KERNELS)


@pytest.mark.parametrize(
    ("host", "device", "message"),
    [
        ([0], None, "host rows are given but device rows are not"),
        (None, [0], "device rows are given but host rows are not"),
        ([0, 1], [0], "2 host rows but 1 device rows"),
        ([128], [0], r"host row 128 is not in \[0, 128\)"),
        ([-1], [0], r"host row -1 is not in"),
    ],
)
def test_host_pool_index_arguments_are_checked_in_one_place(
    host: list[int] | None, device: list[int] | None, message: str
):
    pages = torch.zeros(1, C4_PAGE.page_bytes, dtype=torch.uint8)
    rows = [None if x is None else torch.tensor(x) for x in (host, device)]
    for copy in (HostRowChecks.pool.load_rows, HostRowChecks.pool.backup_rows):
        with pytest.raises(ValueError, match=message):
            copy(1, rows[0], pages, rows[1])
    HostRowChecks.pool.load_rows(1, None, pages, None)


def test_buffer_infos_describe_one_contiguous_buffer_a_layer():
    pool = DeepSeekV4PagedHostPool([1, 3], 5, KERNELS)
    infos = pool.get_contiguous_buf_infos()
    assert [info.layer for info in infos] == [1, 3]
    for info in infos:
        assert info.size == 5 * 37440
        assert info.item_bytes == 37440
        assert info.address == pool.buffers[info.layer].data_ptr()


class PoolMachine(RuleBasedStateMachine):
    """Any order of reserve, release, quarantine and release from quarantine keeps every page in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.pools, _ = make_pools(pages=7, logical=6, slots=3)
        self.held: list[RequestResources] = []
        self.set_aside: list[RequestResources] = []

    @rule(tokens=st.integers(1, 1400))
    def reserve(self, tokens: int) -> None:
        resources = self.pools.reserve(tokens)
        if resources is not None:
            self.held.append(resources)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        resources = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pools.release(resources)
        with pytest.raises(ValueError, match="not owned"):
            self.pools.release(resources)

    @precondition(lambda self: self.held)
    @rule()
    def quarantine(self) -> None:
        self.set_aside.append(self.held.pop())
        self.pools.quarantine(self.set_aside[-1])

    @precondition(lambda self: self.set_aside)
    @rule()
    def leave_quarantine(self) -> None:
        self.pools.release_quarantined(self.set_aside.pop())

    @invariant()
    def sound(self) -> None:
        self.pools.check_integrity(self.held, self.set_aside)
        for use in self.pools.use():
            assert use.free + use.used + use.quarantined == use.total
        for name in ("host_pages", "logical_pages"):
            pages = [page for r in (*self.held, *self.set_aside) for page in getattr(r, name)]
            assert len(pages) == len(set(pages))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
