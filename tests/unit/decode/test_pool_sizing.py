"""From settings and free memory to pools: budgets, defaults, limits, and what start-up says about it."""

import json
import resource

import pytest
import torch

from common.kernels.cpu import cpu_kernels
from common.kv.footprint import Footprint
from common.kv.sizing import PoolSizes, SizingError
from common.memory_limits import MemoryLimit, MemoryLimitError
from common.model.config import ModelConfig
from common.model.public_configs import FLASH
from common.transfer.rdma import RdmaError
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.main import SettingsError, max_context
from decode_service.pool_sizing import UNLIMITED, FreeMemory, check_limits, describe, pool_sizes, registered_bytes
from decode_service.settings import DecodeSettings
from tests.unit.kv.test_sizing import CONFIG, PER, Pools

GIB = 1 << 30


def settings(*flags: str) -> DecodeSettings:
    return DecodeSettings.load(["--model", "/m", *flags])


def memory(host_left: float, *, total: float = 64, cgroup: float | None = None, gpu: float | None = None) -> FreeMemory:
    """In GiB; `cgroup`: a limit of which nothing is used."""
    return FreeMemory(
        MemoryLimit("machine", int(total * GIB), int((total - host_left) * GIB)),
        () if cgroup is None else (MemoryLimit("/cg/memory.max", int(cgroup * GIB), 0),),
        None if gpu is None else MemoryLimit("memory of cuda:0", 141 * 10**9, 141 * 10**9 - int(gpu * GIB)),
    )


def sizes_of(free: FreeMemory, *flags: str) -> PoolSizes:
    return pool_sizes(settings(*flags), CONFIG, PER, free)


def test_nothing_set_without_a_gpu_is_4096_pages_and_64_requests():
    for free in (memory(40), memory(2.5), memory(40, cgroup=3)):
        sizes = sizes_of(free)
        assert (sizes.host_pages, sizes.logical_pages, sizes.requests, sizes.staging_pages) == (4096, 4096, 64, 0)


@pytest.mark.parametrize("left", [0.3, 0.5, 1.0, 1.5])
def test_nothing_set_takes_less_where_a_cgroup_leaves_less(left: float):
    """A quarter of the limit is kept free."""
    sizes = sizes_of(memory(40, cgroup=left))
    pools = Pools(sizes)
    most = left * GIB * 3 / 4
    assert 0 < pools.host_bytes() + pools.device_bytes() <= most
    # The smaller of the two is what binds: a page more in each would not fit either's half.
    assert sizes.host_pages < 4096 or left >= 1.2
    assert sizes.host_bytes + PER.host_page > most / 2 or sizes.host_pages == 4096


def test_nothing_set_with_a_gpu_fills_free_memory_less_reserves():
    flash = ModelConfig.from_dict(FLASH)
    per = Footprint.of(flash.compress_ratios, 2048)
    sizes = pool_sizes(settings(), flash, per, memory(900, total=1000, cgroup=512, gpu=50))
    assert sizes.device_bytes <= 44 * GIB < sizes.device_bytes + per.logical_page
    # 64 requests of the longest kind need 192 GiB on the host; with powers of two a layer 256 of 21 layers fit.
    assert sizes.host_pages == 64 * 4096
    assert sizes.host_bytes == 21 * 16 * GIB
    assert pool_sizes(settings(), flash, per, memory(100, total=1000, gpu=50)).host_bytes <= 84 * GIB


def test_budgets_are_sizes_as_people_write_them():
    sizes = sizes_of(memory(1), "--host-kv-budget", "20MB", "--device-kv-budget", "16MiB")
    assert sizes.host_pages == 20_000_000 // PER.host_page
    assert sizes.logical_pages == sizes.host_pages
    assert sizes.device_bytes <= 16 << 20 < sizes.device_bytes + PER.host_page


def test_counts_win_over_free_memory_but_not_over_a_budget():
    counts = ("--host-pages=160", "--logical-pages=150", "--max-requests=12")
    sizes = sizes_of(memory(0), *counts)
    assert (sizes.host_pages, sizes.logical_pages, sizes.requests) == (160, 150, 12)
    with pytest.raises(SizingError, match="host_kv_budget = 1000000 bytes"):
        sizes_of(memory(0), *counts, "--host-kv-budget", "1MB")
    mixed = sizes_of(memory(40), "--max-requests=12", "--host-pages=7", "--device-kv-budget=40MiB")
    assert (mixed.host_pages, mixed.requests) == (7, 12)
    assert mixed.device_bytes <= 40 << 20


@pytest.mark.parametrize("text", ["", "much", "0", "-1GiB", "0.1"])
def test_what_is_no_budget_is_refused_by_name(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        settings(f"--device-kv-budget={text}")
    assert "device_kv_budget" in capsys.readouterr().err


def test_no_free_memory_is_a_refusal_that_says_where_the_number_is_from():
    with pytest.raises(SizingError) as raised:
        sizes_of(memory(40, cgroup=0.001))
    for part in ("device_kv_budget (auto: /cg/memory.max is 1.0 MiB, 1.0 MiB of it free", "is too small", "bytes"):
        assert part in str(raised.value)


def test_a_longest_request_that_is_asked_for_must_fit():
    flags = ("--max-context-tokens=10000", "--device-kv-budget=40MiB")
    with pytest.raises(SizingError, match=rf"40 host pages \(10240 tokens\) take {40 * PER.host_page} bytes"):
        sizes_of(memory(40), *flags, f"--host-kv-budget={40 * PER.host_page - 1}")
    asked = settings(*flags, f"--host-kv-budget={40 * PER.host_page}")
    assert max_context(asked, CONFIG, pool_sizes(asked, CONFIG, PER, memory(40))) == 10000
    asked = settings("--max-context-tokens=1000", "--host-pages=3")
    with pytest.raises(SettingsError, match="host_pages = 3"):
        max_context(asked, CONFIG, pool_sizes(asked, CONFIG, PER, UNLIMITED))


def test_limits_of_cgroups_are_checked_for_all_pools_without_a_gpu_and_for_the_host_pool_with_one():
    one = settings()
    sizes = PoolSizes(10, 10, 2, 0, 0, host_bytes=3 * GIB, device_bytes=2 * GIB)
    check_limits(one, PER, sizes, memory(1, cgroup=5))
    with pytest.raises(MemoryLimitError, match=r"the KV pools needs 5368709120 bytes .* /cg/memory.max is 5261334937"):
        check_limits(one, PER, sizes, memory(1, cgroup=4.9))
    check_limits(one, PER, sizes, memory(4, cgroup=4, gpu=1))
    with pytest.raises(MemoryLimitError, match=r"the page-locked host pool needs 3221225472 bytes .* /cg/memory.max"):
        check_limits(one, PER, sizes, memory(4, cgroup=2, gpu=1))
    with pytest.raises(MemoryLimitError, match="machine is"):
        check_limits(one, PER, sizes, memory(2, gpu=1))


def test_memlock_is_checked_before_anything_is_registered_for_rdma(monkeypatch: pytest.MonkeyPatch):
    sizes = sizes_of(memory(40), "--host-pages=10", "--logical-pages=10", "--max-requests=2")
    needed = registered_bytes(PER, sizes, on_host=True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (needed - 1, needed - 1))
    check_limits(settings(), PER, sizes, memory(40))
    rdma = settings("--transfer-protocol=rdma")
    with pytest.raises(RdmaError, match=rf"locks {needed} bytes, this process may lock {needed - 1}: set `ulimit -l"):
        check_limits(rdma, PER, sizes, memory(40))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (needed, needed))
    check_limits(rdma, PER, sizes, memory(40))


@pytest.mark.parametrize("flags", [(), ("--admission=staged", "--staging-pages=5")])
def test_what_is_registered_is_what_the_regions_are(flags: tuple[str, ...]):
    sizes = sizes_of(memory(40), "--host-pages=10", "--logical-pages=9", "--max-requests=2", *flags)
    pools = Pools(sizes, real=True)
    regions = pools.device.regions(pools.host, pools.staging).items()
    assert sum(region.size for region in regions) == registered_bytes(PER, sizes, on_host=True)
    landing = 0 if sizes.staging_pages else pools.host_bytes()
    assert registered_bytes(PER, sizes, on_host=False) == landing


@pytest.mark.skipif(torch.cuda.is_available(), reason="page-locked memory can be had here")
def test_memory_that_cannot_be_page_locked_is_named_with_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    with pytest.raises(
        RuntimeError, match=r"3 host pages \(336960 bytes\) can't be page-locked .*memlock limit is 65536"
    ):
        DeepSeekV4PagedHostPool(CONFIG.layers_of(4), 3, cpu_kernels(), page_locked=True)


def test_start_up_says_how_many_requests_fit_each_pool():
    sizes = sizes_of(memory(40), "--host-pages=100", "--logical-pages=64", "--max-requests=3")
    told = describe(sizes, 64 * 256)
    assert told["fits"] == [
        {"tokens": 8192, "requests": 2, "host_c4": 3, "logical": 2, "slots": 3},
        {"tokens": 16384, "requests": 1, "host_c4": 1, "logical": 1, "slots": 3},
    ]
    assert json.loads(json.dumps(told)) == told
