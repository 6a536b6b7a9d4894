"""The bound on choices at the workers, and the order of those that wait."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.errors import ErrorReason, ServiceError
from common.rpc.gen.dsv4pd.v1 import decode_pb2
from router_service.lanes import Lanes
from tests.unit.router.conftest import ServeRouter, eventually
from tests.unit.router.scripted_worker import OFFSET, Event, ScriptedWorker, finished, reserved


async def waiter(lanes: Lanes, priority: int, name: str, order: list[str], timeout_s: float = 10) -> None:
    async with lanes.slot(priority, timeout_s):
        order.append(name)
        await asyncio.sleep(0)


async def queued(lanes: Lanes, order: list[str], *waiting: tuple[int, str]) -> list[asyncio.Task[None]]:
    tasks: list[asyncio.Task[None]] = []
    for priority, name in waiting:
        tasks.append(asyncio.create_task(waiter(lanes, priority, name, order)))
        await asyncio.sleep(0)
    return tasks


async def test_the_more_urgent_go_first_and_equals_in_order_of_arrival():
    lanes, order = Lanes(1, 10), list[str]()
    async with lanes.slot(0, 1):
        tasks = await queued(lanes, order, (5, "late"), (0, "a"), (0, "b"), (-1, "first"))
        assert (lanes.running, lanes.waiting) == (1, 4)
    await asyncio.gather(*tasks)
    # The fourth turn is that of whoever waited longest, here the only one left.
    assert order == ["first", "a", "b", "late"]
    assert (lanes.running, lanes.waiting) == (0, 0)


async def test_the_last_lane_does_not_stand_still():
    lanes, order = Lanes(1, 50), list[str]()
    async with lanes.slot(0, 1):
        tasks = await queued(lanes, order, (9, "patient"), *((0, f"u{n}") for n in range(20)))
    await asyncio.gather(*tasks)
    assert order.index("patient") == 3


async def test_too_many_and_too_long_waits_are_refused_and_leave_nothing_behind():
    lanes = Lanes(1, 1)
    async with lanes.slot(0, 1):
        waiting = asyncio.create_task(waiter(lanes, 0, "x", [], timeout_s=0.05))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError, match="1 choices wait already") as raised:
            async with lanes.slot(0, 1):
                pass
        assert raised.value.reason is ErrorReason.QUEUE_FULL
        with pytest.raises(ServiceError, match=r"no slot came free within 0.05 s"):
            await waiting
    async with lanes.slot(0, 1):
        assert (lanes.running, lanes.waiting) == (1, 0)


async def test_one_that_leaves_in_the_moment_of_its_turn_hands_the_slot_on():
    lanes, order = Lanes(1, 10), list[str]()
    async with lanes.slot(0, 1):
        leaving, staying = await queued(lanes, order, (0, "leaving"), (0, "staying"))
    leaving.cancel()  # its future is set, its task has not run yet
    await asyncio.wait({leaving, staying})
    assert (order, lanes.running, lanes.waiting) == (["staying"], 0, 0)


async def test_priority_decides_which_waiting_request_is_sent_next(serve_router: ServeRouter):
    go = asyncio.Event()

    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        await go.wait()
        yield finished()

    worker = ScriptedWorker(script)
    router = await serve_router([worker], max_dispatched=1, max_waiting=2)
    calls = [asyncio.create_task(router.post(prompt="first"))]
    await eventually(lambda: worker.running == 1)
    for prompt, priority in (("later", 1), ("sooner", -1)):
        calls.append(asyncio.create_task(router.post(prompt=prompt, priority=priority)))
        await eventually(lambda: router.state.workers.lanes.waiting == len(calls) - 1)
    refused = await router.post(prompt="x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert refused.headers["retry-after"] == "1"
    assert await router.metric('dsv4pd_router_choices{phase="waiting"}') == 2
    go.set()
    assert [(await call).status_code for call in calls] == [200] * 3
    sent = [bytes(t - OFFSET for t in r.token_ids).decode() for r in worker.requests]
    assert sent == ["first", "sooner", "later"]
