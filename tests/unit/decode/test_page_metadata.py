"""What the host pool keeps of a request that is as long as requests get: at most 64 KB, however its pages lie."""

import gc
import itertools
import random
import sys
import tracemalloc
from collections.abc import Sequence

import pytest

from common.kernels.cpu import cpu_kernels
from common.kv.layout import host_page_count
from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from decode_service.decode_kv import BatchTables
from decode_service.device_pools import DevicePools
from decode_service.extent_allocator import ExtentAllocator
from decode_service.hisparse import HiSparseCoordinator
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.resources import RequestResources, ResourcePools

MOST_TOKENS = 1 << 20
LIMIT_BYTES = 64 << 10
PAGES = 3 * host_page_count(MOST_TOKENS)
# No layer keeps C4 rows here: the pool's books are those of a pool with memory behind them.
CONFIG = ModelConfig.from_dict(small_config(compress_ratios=[0], num_hidden_layers=1, num_nextn_predict_layers=0))


def make_pools() -> tuple[ResourcePools, ExtentAllocator]:
    host = DeepSeekV4PagedHostPool([], PAGES, cpu_kernels())
    device = DevicePools.of(CONFIG, PAGES, 4)
    hisparse = HiSparseCoordinator(host, cpu_kernels(), 4, 64)
    return ResourcePools(host, device, hisparse.slots), host.allocator


def churn(pool: ExtentAllocator, seed: int = 1) -> None:
    """Lognormal lengths come and go at random, as in benchmarks/host_pool_fragmentation.py, until a request for most of
    what is free finds it in pieces."""
    rng = random.Random(seed)
    living: list[list[int]] = []
    for _ in range(4000):
        count = max(1, min(400, int(rng.lognormvariate(2, 1.2))))
        while pool.free < host_page_count(MOST_TOKENS) + count:
            pool.release(living.pop(rng.randrange(len(living))))
        living.append(pool.take(count) or [])


def kept_bytes(pools: ResourcePools, rows: list[RequestResources]) -> int:
    """What one reservation of the longest request leaves allocated by Python, in all pools together."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    made = pools.reserve(MOST_TOKENS)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert made is not None
    rows.append(made)
    return after - before


def size_of(pages: Sequence[int]) -> int:
    """A container and the integers that it refers to."""
    return sys.getsizeof(pages) + (sum(sys.getsizeof(page) for page in pages) if isinstance(pages, tuple | list) else 0)


@pytest.mark.parametrize("fragmented", [False, True])
def test_a_million_tokens_cost_at_most_64_kb_of_host_pool_metadata(fragmented: bool):
    pools, host = make_pools()
    if fragmented:
        churn(host)
    rows: list[RequestResources] = []
    kept = kept_bytes(pools, rows)
    (resources,) = rows
    assert len(resources.host_pages) == 4096
    jumps = sum(b != a + 1 for a, b in itertools.pairwise(resources.host_pages))
    assert (jumps > 20) == fragmented
    # The lists of both pools and their books; then the host pool's share alone: its list, its row of the batch's table
    # and one byte of state a page.
    assert kept <= LIMIT_BYTES, f"{kept} bytes kept for one request"
    share = size_of(resources.host_pages) + BatchTables.of([resources]).host_pages.nbytes + len(resources.host_pages)
    assert share <= LIMIT_BYTES, f"{share} bytes for the host pool's part"
    pools.release(resources)
    host.check_integrity()


def test_the_measure_would_notice_one_integer_object_a_page():
    assert size_of(tuple(range(1000, 5096))) > LIMIT_BYTES
