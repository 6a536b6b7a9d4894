"""A session for each writer, and fences that end one writer's alone."""

import asyncio
import threading
from typing import Any

import pytest

from common.errors import ErrorReason, ServiceError
from common.kernels.cpu import cpu_kernels
from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from common.transfer.engine import TransferUnavailableError
from common.transfer.ticket import ITEM_BYTES, Region, RegionKind, RegionTable
from decode_service.device_pools import DevicePools
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.landings import Landings
from decode_service.staging import StagingPool

REGIONS = RegionTable(
    [Region(0, RegionKind.WINDOW, 4096, ITEM_BYTES[RegionKind.WINDOW], ITEM_BYTES[RegionKind.WINDOW])]
)


class FakeEngine:
    def __init__(self, session: str) -> None:
        self.session = session
        self.registered: list[tuple[int, int]] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.failures = 0
        self.fences = 0
        self.closed = False

    def register(self, address: int, size: int, piece_bytes: int) -> None:
        self.registered.append((address, size))

    def fence(self, timeout_s: float) -> bool:
        self.fences += 1
        self.may_end.wait(5)
        self.failures -= 1
        return self.failures < 0

    def close(self) -> None:
        self.closed = True


def make_landings(most: int = 9) -> tuple[Any, list[FakeEngine]]:
    engines: list[FakeEngine] = []

    def make() -> FakeEngine:
        if len(engines) == most:
            raise TransferUnavailableError("no port is free")
        engines.append(FakeEngine(f"host:{len(engines)}"))
        return engines[-1]

    make_any: Any = make
    return Landings(make_any, REGIONS), engines


async def test_each_writer_gets_one_session_over_the_same_memory_however_many_ask_at_once():
    landings, engines = make_landings()
    sessions = await asyncio.gather(*(landings.open(writer) for writer in "aabbab"))
    assert sessions == ["host:0", "host:0", "host:1", "host:1", "host:0", "host:1"]
    assert engines[0].registered == engines[1].registered == [(4096, ITEM_BYTES[RegionKind.WINDOW])]


@pytest.mark.parametrize("staged", [False, True])
def test_each_registration_lies_in_one_buffer_of_the_host_or_of_the_device(staged: bool):
    """Mooncake asks of each registration's first byte whether it is the host's or a device's."""
    config, kernels = ModelConfig.from_dict(small_config()), cpu_kernels()
    host = DeepSeekV4PagedHostPool(config.layers_of(4), 5, kernels)
    device = DevicePools.of(config, 6, 2)
    staging = StagingPool(config.layers_of(4), 3, kernels) if staged else None
    regions = device.regions(host, staging)
    engine = FakeEngine("host:0")
    make: Any = lambda: engine  # noqa: E731
    Landings(make, regions.in_pieces(100_000))
    landing = staging.buffers if staging is not None else host.buffers
    buffers = {(buffer.data_ptr(), buffer.nbytes) for buffer in (*device.buffers(), *landing.values())}
    assert len(engine.registered) == len(buffers)
    assert set(engine.registered) == buffers
    # A request's C4 pages are ids of the pool that its region is in, and of no other.
    found = {(r.layer, r.base) for r in regions.items() if r.kind is RegionKind.C4}
    assert found == {(layer, buffer.data_ptr()) for layer, buffer in landing.items()}
    if staged:
        assert not {base for _, base in found} & {buffer.data_ptr() for buffer in host.buffers.values()}


async def test_a_fence_ends_one_writers_session_once_and_its_next_one_is_another():
    landings, engines = make_landings()
    old, other = await landings.open("a"), await landings.open("b")
    engines[0].may_end.clear()
    waiting = [asyncio.create_task(landings.fence("a", old)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    # Meanwhile the writer may have come back: what it writes from now on goes elsewhere.
    new = await landings.open("a")
    assert new not in (old, other)
    engines[0].may_end.set()
    assert await asyncio.gather(*waiting) == [True] * 3
    assert engines[0].fences == 1
    assert landings.fences == 1
    # A late fence of the old session leaves the new one alone.
    assert await landings.fence("a", old)
    assert sorted(landings.sessions) == sorted([new, other])
    assert [engine.fences for engine in engines] == [1, 0, 0]


async def test_a_fence_that_is_not_proven_says_so_until_it_is():
    landings, engines = make_landings()
    session = await landings.open("a")
    engines[0].failures = 2
    found = [await landings.fence("a", session) for _ in range(4)]
    assert found == [False, False, True, True]
    assert landings.fences == 1


async def test_a_replaced_writer_is_retired_and_an_unknown_one_is_nobody():
    landings, engines = make_landings()
    await landings.open("a")
    await landings.retire("nobody")
    assert engines[0].fences == 0
    await landings.retire("a")
    assert engines[0].fences == 1


async def test_a_writer_for_whom_there_is_no_session_is_a_typed_error():
    landings, _ = make_landings(most=1)
    await landings.open("a")
    for _ in range(2):
        with pytest.raises(ServiceError, match="no port is free") as raised:
            await landings.open("b")
        assert raised.value.reason is ErrorReason.INTERNAL


async def test_closing_shuts_every_door():
    landings, engines = make_landings()
    await landings.open("a")
    await landings.open("b")
    landings.close()
    assert all(engine.closed for engine in engines)
