"""Which worker takes a request, and when one counts as usable."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.errors import ServiceError
from common.rpc.gen.dsv4pd.v1 import decode_pb2
from router_service.workers import WorkerPool
from tests.unit.router.conftest import ServeRouter, eventually
from tests.unit.router.scripted_worker import Event, ScriptedWorker, reserved


async def test_decode_with_most_free_pages_and_prefill_with_fewest_tokens_are_chosen(serve_router: ServeRouter):
    decodes = [ScriptedWorker(free_pages=pages) for pages in (10, 90, 50)]
    prefills = [ScriptedWorker(queued_tokens=queued) for queued in (500, 20, 3000)]
    router = await serve_router(decodes, prefills)
    await router.post(prompt="x")
    assert [len(worker.requests) for worker in decodes] == [0, 1, 0]
    assert decodes[1].requests[0].prefill_address == prefills[1].address


async def test_what_was_sent_since_the_last_status_counts(serve_router: ServeRouter):
    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        await asyncio.sleep(60)

    decodes = [ScriptedWorker(script, free_pages=50), ScriptedWorker(script, free_pages=50)]
    prefills = [ScriptedWorker(), ScriptedWorker()]
    router = await serve_router(decodes, prefills, poll_interval_s=60)
    calls = [asyncio.create_task(router.post(prompt="x" * 1000)) for _ in range(6)]
    await eventually(lambda: sum(worker.running for worker in decodes) == 6)
    assert [worker.running for worker in decodes] == [3, 3]
    asked = [r.prefill_address for worker in decodes for r in worker.requests]
    assert [asked.count(worker.address) for worker in prefills] == [3, 3]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_request_goes_where_its_context_fits(serve_router: ServeRouter):
    small, large = ScriptedWorker(free_pages=90), ScriptedWorker(free_pages=5)
    small.status.max_context_tokens = 100
    short, long = ScriptedWorker(queued_tokens=0), ScriptedWorker(queued_tokens=900)
    short.status.max_context_tokens = 100
    router = await serve_router([small, large], [short, long])
    assert (await router.post(prompt="x" * 200)).status_code == 200
    assert (len(small.requests), len(large.requests)) == (0, 1)
    assert large.requests[0].prefill_address == long.address
    assert (await router.post(prompt="x")).status_code == 200
    assert len(small.requests) == 1


@pytest.mark.parametrize("state", ["draining", "not ready"])
async def test_draining_and_unready_workers_are_left_alone_until_they_are_back(serve_router: ServeRouter, state: str):
    first, second = ScriptedWorker(free_pages=90), ScriptedWorker(free_pages=5)
    first.status.draining = state == "draining"
    first.status.ready = state != "not ready"
    router = await serve_router([first, second])
    await router.post(prompt="x")
    assert (len(first.requests), len(second.requests)) == (0, 1)
    shown = (await router.client.get("/ready")).json()["workers"]["decode"]
    assert shown == {first.address: state, second.address: "usable"}
    first.status.draining, first.status.ready = False, True
    await eventually(lambda: router.state.workers.decode[0].usable)
    await router.post(prompt="x")
    assert len(first.requests) == 1


async def test_a_worker_that_does_not_answer_in_time_is_not_used():
    async with asyncio.timeout(10):
        silent = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        pool = WorkerPool([address], [address], interval_s=60, timeout_s=0.2)
        await pool.start()
        assert not pool.ready
        with pytest.raises(ServiceError, match=f"no decode worker is usable \\({address}: "):
            pool.pick_decode(10)
        with pytest.raises(ServiceError, match="no prefill worker is usable"):
            pool.pick_prefill([1] * 10)
        await pool.close()
        silent.close()
