"""Server-sent events as they come, until the client leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router_service.disconnect import ClientGoneError, unless_disconnected
from router_service.generate import Piece


class EventStream(Response):
    """However sending ends, also before the first byte, `pieces` is closed, which tells the workers to end, and
    `on_end` is called. Each event is awaited until the socket has taken it, so a slow reader holds up its own workers
    and no memory grows here."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], pieces: AsyncGenerator[Piece], on_end: Callable[[], None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._events = events
        self._pieces = pieces
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(Request(scope, receive), self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            self._on_end()
            await self._pieces.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
