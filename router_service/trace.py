"""The span of an HTTP request, under which those of its choices are made."""

from __future__ import annotations

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common import tracing


class TraceMiddleware:
    """For POST requests: the others are probes and scrapers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        carrier = {name.decode("latin1"): value.decode("latin1") for name, value in scope["headers"]}
        attributes = {tracing.REQUEST_ID: scope.get("request_id", ""), "http.route": scope["path"]}
        span = tracing.server_span(f"POST {scope['path']}", carrier, attributes)
        tracing.current_span.set(span)
        structlog.contextvars.bind_contextvars(trace_id=f"{span.get_span_context().trace_id:032x}")

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    tracing.fail(span, str(message["status"]))
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            span.end()
