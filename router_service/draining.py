"""The router's end, seen from its door: not ready at once, then no new work, then nothing runs any more."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLL_S = 0.02


class Leaving(Protocol):
    """The parts of the router's state that say how far it is."""

    leaving: bool
    """Not ready; balancers should send nothing more."""
    draining: bool
    """New completions are refused."""
    in_flight: int


class ConnectionCloser:
    """Tells clients with each answer to come again on another connection, once the router is leaving."""

    def __init__(self, app: ASGIApp, state: Leaving) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._state.leaving:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, closing if scope["type"] == "http" else send)


async def drain(state: Leaving, notice_s: float, timeout_s: float) -> int:
    """`notice_s` for balancers to notice, in which requests are still taken; then up to `timeout_s` for those that
    run. Returns how many are left."""
    state.leaving = True
    await asyncio.sleep(notice_s)
    state.draining = True
    end = time.monotonic() + timeout_s
    while state.in_flight and time.monotonic() < end:
        await asyncio.sleep(POLL_S)
    return state.in_flight
