"""Pools sized by bytes: what is really allocated stays inside the budgets, and one more page would not."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cli.plan import make_plan
from common.kernels.cpu import cpu_kernels
from common.kv.footprint import Footprint
from common.kv.layout import C4_PAGE, host_page_count, logical_page_count
from common.kv.sizing import (
    DEFAULT_REQUESTS,
    Budget,
    Counts,
    PoolSizes,
    SizingError,
    free_budget,
    host_pool_bytes,
    lengths_up_to,
    resident_bytes,
    size_pools,
)
from common.model.config import ModelConfig
from common.model.public_configs import FLASH, PRO
from common.model.small_checkpoint import small_config
from decode_service.device_pools import DevicePools
from decode_service.hisparse import HiSparseCoordinator
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.resources import ResourcePools
from decode_service.staging import StagingPool

CONFIG = ModelConfig.from_dict(small_config())
HOT = 100
PER = Footprint.of(CONFIG.compress_ratios, HOT)
MUCH = Budget(1 << 50, "much")


def host(size: int) -> Budget:
    return Budget(size, "host_kv_budget")


def device(size: int) -> Budget:
    return Budget(size, "device_kv_budget")


class Pools:
    """The real ones, of these sizes, as the service makes them; on the meta device unless `real`."""

    def __init__(self, sizes: PoolSizes, real: bool = False) -> None:
        where = torch.device("cpu" if real else "meta")
        kernels = cpu_kernels()
        self.host = DeepSeekV4PagedHostPool(CONFIG.layers_of(4), sizes.host_pages, kernels)
        self.device = DevicePools.of(CONFIG, sizes.logical_pages, sizes.requests, None, where)
        self.hot = HiSparseCoordinator(
            self.host, kernels, sizes.requests, HOT, None, where, sizes.resident_pages,
            min(sizes.host_pages, sizes.logical_pages),
        )  # fmt: skip
        self.staging = None
        if sizes.staging_pages:
            self.staging = StagingPool(CONFIG.layers_of(4), sizes.staging_pages, kernels, None, where)

    def device_bytes(self) -> int:
        hot = self.hot
        tensors = [*self.device.buffers(), hot._on_host, hot._counts, hot._resident]  # pyright: ignore[reportPrivateUsage]
        for layer in self.host.buffers:
            state = self.hot.hot_state(layer)
            tensors += [state.pages, state.entries, state.recency]
        tensors += self.staging.buffers.values() if self.staging is not None else ()
        return sum(tensor.nbytes for tensor in tensors)

    def host_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.host.buffers.values())


@settings(max_examples=60, deadline=None)
@given(
    host_size=st.integers(PER.host_page, 200 << 20),
    device_size=st.integers(8 << 20, 300 << 20),
    staging=st.sampled_from([0, 0, 7]),
    requests=st.sampled_from([0, 0, 1, 2]),
)
def test_what_is_allocated_stays_inside_and_one_more_page_would_not(
    host_size: int, device_size: int, staging: int, requests: int
):
    sizes = size_pools(PER, host(host_size), device(device_size), Counts(requests=requests, staging_pages=staging))
    pools = Pools(sizes)
    assert pools.host_bytes() == sizes.host_bytes <= host_size < sizes.host_bytes + PER.host_page
    assert pools.device_bytes() == sizes.device_bytes <= device_size
    more = device_size - sizes.device_bytes
    if sizes.logical_pages < sizes.host_pages:
        assert more < PER.logical_page
    elif sizes.resident_pages < sizes.host_pages:
        pages = min(sizes.host_pages, sizes.logical_pages)
        first = 0 if sizes.resident_pages else resident_bytes(PER, 1, sizes.requests, pages)
        assert more < max(PER.host_page, first)
    assert sizes.requests <= DEFAULT_REQUESTS
    assert sizes.requests == requests or sizes.requests * PER.slots <= device_size // 2 or sizes.requests == 1


@pytest.mark.parametrize("size", [4 << 20, 23456789, 64 << 20])
def test_real_memory_is_what_the_meta_device_says(size: int):
    sizes = size_pools(PER, host(size), device(size), Counts())
    real, meta = Pools(sizes, real=True), Pools(sizes)
    assert (real.host_bytes(), real.device_bytes()) == (meta.host_bytes(), meta.device_bytes())


@pytest.mark.parametrize("tokens", [256, 257, 1000, 65536])
@pytest.mark.parametrize("staging", [0, 5])
@pytest.mark.parametrize("locked", [False, True])
def test_a_budget_too_small_for_one_request_is_refused_with_the_number_needed(tokens: int, staging: int, locked: bool):
    counts = Counts(staging_pages=staging)

    def needed(one: Budget, other: Budget) -> int:
        with pytest.raises(SizingError) as raised:
            size_pools(PER, one, other, counts, tokens, locked)
        assert "_kv_budget = 1 bytes (1 B) is too small" in str(raised.value)
        found = re.search(r"take (\d+) bytes", str(raised.value))
        assert found is not None
        return int(found[1])

    on_device, on_host = needed(MUCH, device(1)), needed(host(1), MUCH)
    sizes = size_pools(PER, host(on_host), device(on_device), counts, tokens, locked)
    assert sizes.requests == sizes.most_requests(tokens) == 1
    assert sizes.most_tokens() >= tokens
    with pytest.raises(SizingError, match=f"device_kv_budget = {on_device - 1} bytes .* {on_device} bytes"):
        size_pools(PER, host(on_host), device(on_device - 1), counts, tokens, locked)
    with pytest.raises(SizingError, match=f"host_kv_budget = {on_host - 1} bytes .* {on_host} bytes"):
        size_pools(PER, host(on_host - 1), device(on_device), counts, tokens, locked)


def test_counts_that_are_given_win_and_must_fit_the_budget():
    counts = Counts(host_pages=9, logical_pages=11, requests=3, staging_pages=2)
    sizes = size_pools(PER, MUCH, MUCH, counts)
    assert (sizes.host_pages, sizes.logical_pages, sizes.requests, sizes.staging_pages) == (9, 11, 3, 2)
    # Without a bound every host page may be resident, and no more.
    assert sizes.resident_pages == 9
    assert size_pools(PER, host(sizes.host_bytes), device(sizes.device_bytes), counts) == sizes
    asked = dataclasses.replace(counts, resident_pages=4)
    four = size_pools(PER, MUCH, MUCH, asked)
    assert (four.resident_pages, four.device_bytes) == (4, sizes.device_bytes - 5 * PER.host_page)
    with pytest.raises(SizingError, match=rf"and 4 resident pages take {four.device_bytes} bytes"):
        size_pools(PER, MUCH, device(four.device_bytes - 1), asked)
    none = size_pools(PER, MUCH, MUCH, dataclasses.replace(counts, resident_pages=0))
    with pytest.raises(SizingError, match=r"slots of 3 requests with 11 logical pages .* and 2 staging pages take"):
        size_pools(PER, MUCH, device(none.device_bytes - 1), counts)
    with pytest.raises(SizingError, match=rf"9 host pages \(2304 tokens\) take {9 * PER.host_page} bytes"):
        size_pools(PER, host(sizes.host_bytes - 1), MUCH, counts)


def test_a_budget_from_free_memory_is_not_filled_with_pages_that_no_request_can_use():
    bounded = Budget(1 << 50, "auto", most_pages=70, most_resident=30)
    sizes = size_pools(PER, bounded, bounded, Counts())
    assert (sizes.host_pages, sizes.logical_pages, sizes.requests) == (70, 70, DEFAULT_REQUESTS)
    assert sizes.resident_pages == 30


@settings(max_examples=200, deadline=None)
@given(size=st.integers(3 * 65536, 1 << 44))
def test_page_locked_buffers_are_powers_of_two_and_stay_inside(size: int):
    layers = PER.host_page // C4_PAGE.page_bytes
    sizes = size_pools(PER, host(size), MUCH, Counts(), page_locked=True)
    per_layer = sizes.host_bytes // layers
    assert per_layer & (per_layer - 1) == 0
    assert per_layer >= sizes.host_pages * C4_PAGE.page_bytes
    assert sizes.host_bytes <= size < host_pool_bytes(PER, sizes.host_pages + 1, True)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), tokens=st.integers(4, 4000))
def test_the_requests_that_start_up_says_are_those_that_the_pools_hold(data: st.DataObject, tokens: int):
    least_host = PER.host_page * logical_page_count(tokens)
    least_device = PER.shared + PER.device_bytes(tokens)
    sizes = size_pools(
        PER,
        host(data.draw(st.integers(least_host, 20 * least_host))),
        device(data.draw(st.integers(least_device, 20 * least_device))),
        Counts(),
        tokens,
    )
    made = Pools(sizes)
    pools = ResourcePools(made.host, made.device, made.hot.slots)
    held = 0
    while pools.reserve(tokens) is not None:
        held += 1
    fits = sizes.fits(tokens)
    assert held == sizes.most_requests(tokens) == min(fits.values()) >= 1
    assert fits["host_c4"] == sizes.host_pages // host_page_count(tokens)
    assert fits["logical"] == sizes.logical_pages // logical_page_count(tokens)
    assert fits["slots"] == sizes.requests


@pytest.mark.parametrize("public", [FLASH, PRO])
@pytest.mark.parametrize("hot", [1, 4])
def test_a_plan_is_what_start_up_makes_of_the_same_memory(public: dict[str, object], hot: int):
    """With as many slots as the plan has requests, exactly those fit, and no more whatever the number of slots."""
    config = ModelConfig.from_dict(public)
    plan = make_plan("x", config, 10**12, 141 * 10**9, 8, hot * config.index_topk, 1 << 20)
    assert [fit.tokens for fit in plan.fits] == [8192, 32768, 131072, 262144, 1 << 20]
    for fit in plan.fits:
        assert fit.hisparse > 0
        for requests in (fit.hisparse, fit.hisparse + 1):
            try:
                sizes = size_pools(
                    plan.footprint, host(plan.host_budget), device(plan.device_budget), Counts(requests=requests)
                )
            except SizingError:
                assert requests > fit.hisparse
            else:
                assert sizes.most_requests(fit.tokens) <= fit.hisparse
                assert requests > fit.hisparse or sizes.most_requests(fit.tokens) == fit.hisparse


def test_reserves_are_a_quarter_of_small_memory_and_bounded_in_large():
    assert free_budget(4 << 30, 3 << 30, 16 << 30) == 2 << 30
    assert free_budget(1 << 40, 1 << 39, 16 << 30) == (1 << 39) - (16 << 30)
    assert free_budget(1 << 40, 1 << 39, 16 << 30, share=2) == ((1 << 39) - (16 << 30)) // 2
    assert free_budget(8 << 30, 1 << 30, 16 << 30) == 0


def test_lengths_end_with_the_longest_request():
    assert lengths_up_to(100) == (100,)
    assert lengths_up_to(32768) == (8192, 32768)
    assert lengths_up_to(65536) == (8192, 32768, 65536)
