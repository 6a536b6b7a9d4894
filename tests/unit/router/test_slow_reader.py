"""A client that does not read holds up its own worker and nobody else, and costs a bounded amount of memory."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest

from common.rpc.gen.dsv4pd.v1 import decode_pb2
from tests.unit.router.conftest import ServeRouter, eventually
from tests.unit.router.scripted_worker import Event, ScriptedWorker, finished, reserved, tokens

ENDLESS = 3_000_000
# The socket's buffer (4 MB, 200 bytes an event of ten tokens), gRPC's window (64 KiB, 35 bytes), some events in hand.
BOUND = 300_000


@pytest.mark.parametrize("choices", [1, 2])
async def test_what_a_client_does_not_read_is_not_produced(serve_router: ServeRouter, choices: int):
    made = 0

    async def script(request: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        nonlocal made
        yield reserved()
        if request.sampling.max_tokens < 10:
            yield tokens([70])
            yield finished()
            return
        for _ in range(ENDLESS // 10):
            made += 10
            yield tokens([70] * 10)
            await asyncio.sleep(0)

    worker = ScriptedWorker(script)
    worker.status.max_context_tokens = 4096
    router = await serve_router([worker])
    host, _, port = router.url.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    body = json.dumps({"prompt": "x", "max_tokens": 1000, "n": choices, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    await eventually(lambda: made > 0)
    before = -1
    async with asyncio.timeout(20):
        while made != before:
            before = made
            await asyncio.sleep(0.3)
    assert made < BOUND
    # It stands still, and others are served.
    assert (await router.post(prompt="x", max_tokens=1)).status_code == 200
    assert made == before
    connection.close()
    await eventually(lambda: worker.running == 0, 2)
    await eventually(lambda: router.state.in_flight == 0)


async def test_a_worker_that_falls_silent_is_given_up(serve_router: ServeRouter):
    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        for _ in range(4):  # heard from often enough: the limit is for a silence, not for the whole
            await asyncio.sleep(0.15)
            yield tokens([70])
        await asyncio.sleep(60)

    worker = ScriptedWorker(script)
    router = await serve_router([worker], event_timeout_s=0.3)
    events = (await router.post(prompt="x", stream=True)).text.split("\n\n")
    assert [json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events[:4]] == ["B"] * 4
    error = json.loads(events[4].removeprefix("data: "))["error"]
    assert (error["code"], "said nothing for 0.3 s" in error["message"]) == ("deadline_exceeded", True)
    await eventually(lambda: worker.running == 0)
    plain = await router.post(prompt="x")
    assert (plain.status_code, plain.headers["x-should-retry"]) == (504, "false")
