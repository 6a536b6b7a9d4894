"""Every failure of a worker has its HTTP status; retries happen only before anything was dispatched."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from common.errors import ErrorReason, ServiceError
from common.rpc.gen.dsv4pd.v1 import decode_pb2
from tests.unit.router.conftest import ServeRouter, eventually
from tests.unit.router.scripted_worker import Event, ScriptedWorker, failing, reserved, saying, tokens

STATUS = [
    (ErrorReason.INVALID_REQUEST, 400),
    (ErrorReason.CONTEXT_TOO_LONG, 400),
    (ErrorReason.POOL_EXHAUSTED, 400),
    (ErrorReason.NOT_FOUND, 404),
    (ErrorReason.DUPLICATE_REQUEST, 409),
    (ErrorReason.QUEUE_FULL, 429),
    (ErrorReason.INTERNAL, 500),
    (ErrorReason.STALE_GENERATION, 500),
    (ErrorReason.CANCELLED, 500),
    (ErrorReason.PREFILL_FAILED, 502),
    (ErrorReason.TRANSFER_FAILED, 502),
    (ErrorReason.DIGEST_MISMATCH, 502),
    (ErrorReason.LAYOUT_MISMATCH, 502),
    (ErrorReason.PREFILL_UNAVAILABLE, 503),
    (ErrorReason.DECODE_UNAVAILABLE, 503),
    (ErrorReason.DRAINING, 503),
    (ErrorReason.DEADLINE_EXCEEDED, 504),
]


def test_the_table_below_names_every_reason():
    assert {reason for reason, _ in STATUS} == set(ErrorReason)


@pytest.mark.parametrize(("reason", "status"), STATUS, ids=[reason.name for reason, _ in STATUS])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_decides_the_status_line(
    serve_router: ServeRouter, reason: ErrorReason, status: int, stream: bool
):
    error = ServiceError(reason, "said by the worker", field="prompt", retry_after_s=1.5)
    router = await serve_router([ScriptedWorker(failing(error, (reserved(),)))])
    answer = await router.post(prompt="x", stream=stream)
    assert answer.status_code == status
    body = answer.json()["error"]
    assert (body["message"], body["param"], body["code"]) == ("said by the worker", "prompt", reason.name.lower())
    assert body["type"].endswith("_error")
    assert (body["type"] == "server_error") == (status >= 500)
    assert answer.headers["retry-after"] == "2"
    # Memory was reserved, so work was dispatched: clients must not repeat it, unless it was refused at the door.
    refused = reason in (ErrorReason.QUEUE_FULL, ErrorReason.DRAINING)
    assert (answer.headers.get("x-should-retry") == "false") == (status >= 500 and not refused)
    assert router.state.in_flight == 0
    assert await router.metric(f'dsv4pd_router_failures_total{{reason="{reason.name.lower()}"}}') == 1


@pytest.mark.parametrize("reason", [decode_pb2.FINISH_REASON_UNSPECIFIED, 42])
async def test_a_finish_reason_that_the_router_does_not_know_is_a_typed_error(serve_router: ServeRouter, reason: int):
    router = await serve_router([ScriptedWorker(saying("abc", reason=reason))])
    answer = await router.post(prompt="x")
    assert answer.status_code == 500
    assert f"finish reason {reason}" in answer.json()["error"]["message"]


async def test_an_error_after_the_first_token_is_one_event_and_the_end(serve_router: ServeRouter):
    error = ServiceError(ErrorReason.TRANSFER_FAILED, "gone")
    router = await serve_router([ScriptedWorker(failing(error, (reserved(), tokens([70]))))])
    chunks = await router.events(prompt="x")
    assert [c["choices"][0]["text"] for c in chunks[:-1]] == ["B"]
    assert chunks[-1] == {
        "error": {"message": "gone", "type": "server_error", "param": None, "code": "transfer_failed"}
    }
    await eventually(lambda: router.state.in_flight == 0)
    assert (await router.post(prompt="x")).status_code == 502


async def test_a_stream_that_ends_without_a_result_is_an_error(serve_router: ServeRouter):
    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        yield tokens([70])

    router = await serve_router([ScriptedWorker(script)])
    answer = await router.post(prompt="x")
    assert answer.status_code == 500
    assert "without a result" in answer.json()["error"]["message"]


async def test_missing_logprobs_are_an_error_and_no_broken_stream(serve_router: ServeRouter):
    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        yield tokens([70], logprobs=True)
        yield tokens([70])

    router = await serve_router([ScriptedWorker(script)])
    chunks = await router.events(prompt="x", logprobs=1)
    assert "logprobs" in chunks[-1]["error"]["message"]


async def test_a_silent_worker_is_given_up_after_the_deadline(serve_router: ServeRouter):
    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        await asyncio.sleep(60)

    worker = ScriptedWorker(script)
    router = await serve_router([worker], event_timeout_s=0.2)
    answer = await router.post(prompt="x")
    assert answer.status_code == 504
    await eventually(lambda: worker.cancelled == 1)


@pytest.mark.parametrize("reason", [ErrorReason.DRAINING, ErrorReason.DECODE_UNAVAILABLE])
async def test_a_worker_that_refuses_is_replaced_by_another(serve_router: ServeRouter, reason: ErrorReason):
    first = ScriptedWorker(failing(ServiceError(reason, "not me")), free_pages=100)
    second = ScriptedWorker(saying("second"), free_pages=1)
    router = await serve_router([first, second])
    assert (await router.post(prompt="x")).json()["choices"][0]["text"] == "second"
    assert len(first.requests) == 1


@pytest.mark.parametrize("reason", [ErrorReason.INTERNAL, ErrorReason.INVALID_REQUEST])
async def test_other_refusals_are_not_tried_elsewhere(serve_router: ServeRouter, reason: ErrorReason):
    first = ScriptedWorker(failing(ServiceError(reason, "no")), free_pages=100)
    second = ScriptedWorker(free_pages=1)
    router = await serve_router([first, second])
    assert (await router.post(prompt="x")).status_code in (400, 500)
    assert second.requests == []


async def test_nothing_is_repeated_once_memory_was_reserved(serve_router: ServeRouter):
    lost = ServiceError(ErrorReason.DECODE_UNAVAILABLE, "lost")
    first = ScriptedWorker(failing(lost, (reserved(),)), free_pages=100)
    second = ScriptedWorker(free_pages=1)
    router = await serve_router([first, second])
    answer = await router.post(prompt="x")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
    assert second.requests == []


async def test_no_worker_is_503_with_a_hint_and_may_be_retried(serve_router: ServeRouter):
    worker = ScriptedWorker()
    router = await serve_router([worker])
    await worker.stop()
    await eventually(lambda: not router.state.workers.ready)
    answer = await router.post(prompt="x")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert "x-should-retry" not in answer.headers
    ready = await router.client.get("/ready")
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    assert int(ready.headers["retry-after"]) >= 1
    port = int(worker.address.rpartition(":")[2])
    await worker.start(port)
    await eventually(lambda: router.state.workers.ready)
    assert (await router.post(prompt="x")).status_code == 200
    await worker.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["before reservation", "before the first token", "between tokens"])
async def test_a_client_that_leaves_ends_the_calls(serve_router: ServeRouter, stream: bool, phase: str):
    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        if phase != "before reservation":
            yield reserved()
        if phase == "between tokens":
            yield tokens([70])
        await asyncio.sleep(60)

    worker = ScriptedWorker(script)
    router = await serve_router([worker])
    body = {"prompt": "x", "stream": stream, "n": 2}
    async with httpx.AsyncClient(base_url=router.url, timeout=20) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: worker.running == 2)
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await eventually(lambda: worker.running == 0, 1.0)
    await eventually(lambda: router.state.in_flight == 0, 1.0)
    assert worker.cancelled == 2


async def test_a_client_that_leaves_before_the_first_byte_is_sent_is_no_leak(serve_router: ServeRouter):
    """The status is decided, the answer's first byte never goes out, so that the events are never asked for."""

    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        yield tokens([70])
        await asyncio.sleep(60)

    worker = ScriptedWorker(script)
    router = await serve_router([worker])
    body = b'{"prompt": "x", "stream": true}'
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http", "server": None, "client": None,
    }  # fmt: skip
    body_read, sending = False, asyncio.Event()

    async def receive() -> dict[str, object]:
        nonlocal body_read
        if not body_read:
            body_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await sending.wait()
        return {"type": "http.disconnect"}

    async def send(_: object) -> None:
        sending.set()
        await asyncio.sleep(60)

    async with asyncio.timeout(10):
        await router.app(scope, receive, send)  # type: ignore[arg-type]
    assert router.state.in_flight == 0
    await eventually(lambda: worker.cancelled == 1, 1.0)


async def test_too_many_at_once_are_shed_with_429(serve_router: ServeRouter):
    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        await asyncio.sleep(60)

    worker = ScriptedWorker(script)
    router = await serve_router([worker], max_in_flight=1)
    held = asyncio.create_task(router.post(prompt="x"))
    await eventually(lambda: worker.running == 1)
    answer = await router.post(prompt="x")
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(answer.headers["retry-after"]) >= 1
    assert await router.metric("dsv4pd_router_shed_total") == 1
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    worker.script = saying("again")
    await eventually(lambda: router.state.in_flight == 0)
    assert (await router.post(prompt="x")).status_code == 200


async def test_a_draining_router_takes_nothing_new(serve_router: ServeRouter):
    router = await serve_router()
    router.state.draining = True
    answer = await router.post(prompt="x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert (await router.client.get("/ready")).status_code == 503
    assert (await router.client.get("/health")).status_code == 200
