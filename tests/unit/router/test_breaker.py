"""When a worker's breaker opens, lets one try, and closes; and what counts against whom."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.errors import ErrorReason, ServiceError
from common.rpc.channels import open_channel
from common.rpc.gen.dsv4pd.v1 import decode_pb2
from router_service.breaker import Breaker, BreakerSettings
from router_service.trial import Trial
from router_service.worker import Worker
from tests.unit.router.conftest import ServeRouter, eventually
from tests.unit.router.scripted_worker import Event, ScriptedWorker, failing, reserved, saying, tokens


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(failures: int = 3, open_s: float = 10.0) -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(BreakerSettings(failures, open_s), clock), clock


def fail(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.begin()
        breaker.failed()


def test_it_opens_after_failures_in_a_row_and_not_before():
    breaker, _ = make()
    fail(breaker, 2)
    assert (breaker.state, breaker.allows()) == ("closed", True)
    breaker.begin()
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.state == "closed"
    fail(breaker)
    assert (breaker.state, breaker.allows()) == ("open", False)


def test_one_request_tries_when_its_time_is_over_and_closes_it():
    breaker, clock = make()
    fail(breaker, 3)
    clock.now += 10
    assert (breaker.state, breaker.allows()) == ("half_open", True)
    breaker.begin()
    assert not breaker.allows()
    breaker.succeeded()
    assert (breaker.state, breaker.allows()) == ("closed", True)
    fail(breaker, 2)
    assert breaker.state == "closed"


def test_a_failed_try_opens_it_for_longer_up_to_a_bound():
    breaker, clock = make()
    fail(breaker, 3)
    for seconds in (20, 40, 80, 80):
        clock.now = breaker._open_until
        fail(breaker)
        clock.now += seconds - 0.1
        assert breaker.state == "open"
        clock.now += 0.1
        assert breaker.state == "half_open"


def test_a_try_without_a_verdict_lets_the_next_one_try():
    breaker, clock = make()
    fail(breaker, 3)
    clock.now += 10
    breaker.begin()
    breaker.left()
    assert breaker.allows()


def test_requests_that_were_under_way_when_it_opened_do_not_prolong_it():
    breaker, clock = make()
    fail(breaker, 3)
    clock.now += 5
    fail(breaker, 20)
    clock.now += 5
    assert breaker.state == "half_open"


# Who is at fault: d = decode, p = prefill, before and after decode reserved memory.
BLAME = [
    (ErrorReason.INVALID_REQUEST, "", "", ""),
    (ErrorReason.CONTEXT_TOO_LONG, "", "", ""),
    (ErrorReason.POOL_EXHAUSTED, "", "", ""),
    (ErrorReason.NOT_FOUND, "", "", ""),
    (ErrorReason.QUEUE_FULL, "", "", ""),
    (ErrorReason.DUPLICATE_REQUEST, "", "", ""),
    (ErrorReason.STALE_GENERATION, "", "", ""),
    (ErrorReason.CANCELLED, "", "", ""),
    (ErrorReason.DRAINING, "", "", ""),
    (ErrorReason.DEADLINE_EXCEEDED, "queue_timeout_s", "", ""),
    (ErrorReason.DEADLINE_EXCEEDED, "prefill_timeout_s", "p", "p"),
    (ErrorReason.DEADLINE_EXCEEDED, "", "d", "d"),
    (ErrorReason.DECODE_UNAVAILABLE, "", "d", "d"),
    (ErrorReason.PREFILL_UNAVAILABLE, "", "p", "p"),
    (ErrorReason.PREFILL_FAILED, "", "p", "p"),
    (ErrorReason.TRANSFER_FAILED, "", "dp", "dp"),
    (ErrorReason.DIGEST_MISMATCH, "", "dp", "dp"),
    (ErrorReason.LAYOUT_MISMATCH, "", "dp", "dp"),
    (ErrorReason.INTERNAL, "", "d", "d"),
]


def test_the_table_names_every_reason():
    assert {row[0] for row in BLAME} == set(ErrorReason)


@pytest.mark.parametrize("row", BLAME, ids=lambda row: f"{row[0].name}-{row[1]}")
async def test_only_what_is_a_workers_fault_counts_against_it(row: tuple[ErrorReason, str, str, str]):
    reason, field, before, after = row
    for is_reserved, expected in ((False, before), (True, after)):
        settings = BreakerSettings(failures=1)
        decode = Worker("decode", "d:1", open_channel("d:1"), True, Breaker(settings), usable=True)
        prefill = Worker("prefill", "p:1", open_channel("p:1"), True, Breaker(settings), usable=True)
        trial = Trial(decode, prefill)
        trial.reserved = is_reserved
        trial.failed(ServiceError(reason, "said", field=field))
        trial.end()
        opened = "".join(w.role[0] for w in (decode, prefill) if w.breaker.state == "open")
        assert opened == expected
        await decode.channel.close()
        await prefill.channel.close()


async def test_a_worker_that_keeps_failing_is_left_alone_and_used_again_when_it_does_well(serve_router: ServeRouter):
    bad = ScriptedWorker(
        failing(ServiceError(ErrorReason.INTERNAL, "broken"), (reserved(), tokens([70]))), free_pages=90
    )
    good = ScriptedWorker(free_pages=5)
    router = await serve_router([bad, good], breaker_failures=3, breaker_open_s=0.4)
    statuses = [(await router.post(prompt="x")).status_code for _ in range(6)]
    assert statuses == [500, 500, 500, 200, 200, 200]
    shown = (await router.client.get("/ready")).json()["workers"]["decode"]
    assert shown[bad.address] == "its last requests failed"
    assert await router.metric(f'dsv4pd_router_breaker_open{{address="{bad.address}",role="decode"}}') == 1
    bad.script = saying("ok")
    await asyncio.sleep(0.5)
    before = len(bad.requests)
    assert [(await router.post(prompt="x")).status_code for _ in range(3)] == [200, 200, 200]
    assert len(bad.requests) == before + 3


async def test_a_full_worker_is_passed_over_and_only_when_all_are_full_it_is_429(serve_router: ServeRouter):
    full = failing(ServiceError(ErrorReason.QUEUE_FULL, "16 wait", retry_after_s=2))
    first, second = ScriptedWorker(full, free_pages=90), ScriptedWorker(free_pages=5)
    router = await serve_router([first, second], breaker_failures=1)
    assert (await router.post(prompt="x")).status_code == 200
    second.script = full
    answer = await router.post(prompt="x")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert [w.breaker.state for w in router.state.workers.decode] == ["closed", "closed"]


async def test_a_prefill_that_refuses_before_it_began_is_replaced_unseen(serve_router: ServeRouter):
    leaving = ScriptedWorker(queued_tokens=0)
    other = ScriptedWorker(queued_tokens=500)

    async def script(request: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        if request.prefill_address == leaving.address:
            raise ServiceError(ErrorReason.DRAINING, "this prefill service is draining")
        async for event in saying("ok")(request):
            yield event

    decode = ScriptedWorker(script)
    router = await serve_router([decode], [leaving, other], poll_interval_s=60)
    answer = await router.post(prompt="x")
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "ok")
    assert [r.prefill_address for r in decode.requests] == [leaving.address, other.address]
    assert len({r.request_id for r in decode.requests}) == 2


@pytest.mark.parametrize("shown", [False, True])
async def test_a_prefill_that_fails_after_it_began_is_not_replaced(serve_router: ServeRouter, shown: bool):
    events = (reserved(), tokens([70])) if shown else (reserved(),)
    error = ServiceError(ErrorReason.PREFILL_UNAVAILABLE, "gone", not_begun=shown)
    decode = ScriptedWorker(failing(error, events))
    router = await serve_router([decode], [ScriptedWorker(), ScriptedWorker()])
    answer = await router.post(prompt="x")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
    assert len(decode.requests) == 1
    await eventually(lambda: decode.running == 0)
