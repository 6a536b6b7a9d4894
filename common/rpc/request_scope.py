"""What goes with a request from process to process: the HTTP request's id and its trace, in gRPC metadata."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog
from opentelemetry.trace import Span

from common import tracing

Context = grpc.aio.ServicerContext[Any, Any]
REQUEST_ID_KEY = "x-request-id"
MAX_ID_CHARACTERS = 128
_http_request_id: ContextVar[str] = ContextVar("http_request_id", default="")


class StreamSpans(Protocol):
    """Reads the phases of a request off the events of its stream."""

    def saw(self, event: Any) -> None: ...

    def end(self) -> None:
        """The stream is over, however it ended."""
        ...


MakeSpans = Callable[[Span, int], StreamSpans]


def outgoing_metadata(request_id: str = "", span: Span | None = None) -> tuple[tuple[str, str], ...]:
    """For calls made on behalf of the request that this task serves."""
    carrier = tracing.carrier_of(span or tracing.current_span.get())
    name = request_id or _http_request_id.get()
    return ((REQUEST_ID_KEY, name), *carrier.items()) if name else tuple(carrier.items())


class RequestScope(grpc.aio.ServerInterceptor):
    """Binds the id for the logs of every streaming call, and makes spans where tracing is on."""

    def __init__(self, spans: Mapping[str, MakeSpans], *, traced: bool) -> None:
        """`spans` by full method name."""
        self._spans = spans if traced else {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith("/dsv4pd.") or handler.unary_stream is None:
            return handler
        return grpc.unary_stream_rpc_method_handler(
            _scoped(handler.unary_stream, method, self._spans.get(method)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _scoped(call: Any, method: str, make: MakeSpans | None) -> Callable[[Any, Context], AsyncGenerator[Any]]:
    async def scoped(request: Any, context: Context) -> AsyncGenerator[Any]:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        request_id = metadata.get(REQUEST_ID_KEY, "")[:MAX_ID_CHARACTERS]
        _http_request_id.set(request_id)
        structlog.contextvars.bind_contextvars(http_request_id=request_id)
        begun = time.time_ns()
        if make is None:
            try:
                async with aclosing(call(request, context)) as events:
                    async for event in events:
                        yield event
            finally:
                _log_end(method, begun)
            return
        span = tracing.server_span(method[1:], metadata, {tracing.REQUEST_ID: request_id})
        structlog.contextvars.bind_contextvars(trace_id=f"{span.get_span_context().trace_id:032x}")
        tracing.current_span.set(span)
        spans = make(span, begun)
        try:
            async with aclosing(call(request, context)) as events:
                async for event in events:
                    spans.saw(event)
                    yield event
        except (asyncio.CancelledError, GeneratorExit):
            # Also a caller that has all it wants ends the call so.
            span.set_attribute("ended_by_caller", True)
            raise
        except BaseException as error:
            tracing.fail(span, context.details() or type(error).__name__)
            raise
        finally:
            spans.end()
            span.end()
            _log_end(method, begun)

    return scoped


def _log_end(method: str, begun_ns: int) -> None:
    structlog.get_logger().info("call over", method=method, seconds=round((time.time_ns() - begun_ns) / 1e9, 4))
