"""uvicorn's HTTP protocol with bounds on a request's head: its length, and how long it may take to come."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class HeadTooLongError(ValueError):
    """Ends the parser."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """The bounds are class attributes: uvicorn makes the instances. Use `bounded` for others."""

    max_head_bytes = 32 << 10
    head_timeout_s = 10.0

    _head_bytes = 0
    _in_head = True
    _too_long = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # A head that is complete has been measured exactly; this one may never be.
        if self._in_head and self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
            self._refuse(431, f"the head of the request is longer than {self.max_head_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        length = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if length > self.max_head_bytes:
            self._too_long = True
            raise HeadTooLongError
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """The parser gave up."""
        if self._too_long:
            self._refuse(431, f"the head of the request is longer than {self.max_head_bytes} bytes")
        else:
            self._refuse(400, "this is no HTTP request")

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_timeout_s, self._head_timed_out)

    def _head_timed_out(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, f"the head of the request did not come within {self.head_timeout_s:g} s")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answers in OpenAI's shape and closes: what follows on this connection can't be told apart."""
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


def bounded(head_bytes: int, timeout_s: float) -> type[BoundedHttpProtocol]:
    """The protocol with these bounds."""

    class Protocol(BoundedHttpProtocol):
        max_head_bytes = head_bytes
        head_timeout_s = timeout_s

    return Protocol
