"""The HTTP application."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import ServiceError
from common.model.config import ModelConfig
from common.model.tokenizer import Tokenizer
from common.rpc.tls import Tls
from common.version import VERSION
from router_service import errors
from router_service.access import AccessMiddleware
from router_service.answers import Answers, TextAnswers
from router_service.api_keys import ApiKeys
from router_service.breaker import BreakerSettings
from router_service.chat import ChatAnswers, chat_generation
from router_service.chat_encoding import chat_encoding
from router_service.chat_protocol import ChatRequest
from router_service.client_context import client_context, from_headers
from router_service.completions import Completion
from router_service.disconnect import ClientGoneError, unless_disconnected
from router_service.documented import ERROR_RESPONSES, READY_RESPONSES, answers_schema
from router_service.draining import ConnectionCloser
from router_service.errors import HTTPError
from router_service.event_stream import EventStream
from router_service.generate import Piece
from router_service.generation import text_generation
from router_service.lanes import Lanes
from router_service.metrics import RouterMetrics, publish_workers
from router_service.placement import PlacementSettings
from router_service.protocol import CompletionRequest
from router_service.settings import RouterSettings
from router_service.tokenisation import add_tokenisation
from router_service.trace import TraceMiddleware
from router_service.workers import WorkerPool

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# What nginx logs for a client that left before the answer; nobody receives it.
CLIENT_CLOSED = 499
LONG_BODY_BYTES = 32 << 10


class BodyTooLongError(BaseException):
    """Ends the reading of a body. No Exception: the framework would answer that the body could not be parsed."""


class RouterState:
    """What the endpoints share."""

    def __init__(self, settings: RouterSettings, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.config = config
        self.tokenizer = tokenizer
        self.model_name = settings.model_name or settings.model.resolve().name
        self.metrics = RouterMetrics()
        self.tls = Tls.load(settings.tls_ca, settings.tls_cert, settings.tls_key)
        self.workers = WorkerPool(
            settings.addresses("prefill"),
            settings.addresses("decode"),
            settings.poll_interval_s,
            settings.poll_timeout_s,
            breaker=BreakerSettings(settings.breaker_failures, settings.breaker_open_s),
            placement=PlacementSettings(settings.prefix_affinity_tokens, settings.affinity_slack_tokens),
            lanes=Lanes(settings.max_dispatched, settings.max_waiting, self.metrics.queue_seconds.observe),
            tls=self.tls,
        )
        self.keys = None if settings.api_keys is None else ApiKeys.load(settings.api_keys)
        publish_workers(self.metrics, self.workers)
        self.chat_encoding = chat_encoding(tokenizer)
        self.leaving = False
        self.draining = False
        self.in_flight = 0

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of prompt and output together: what a worker said, before that the model's positions."""
        return self.workers.max_context_tokens or self.config.max_positions


class RequestIdMiddleware:
    """Gives every request an id (the client's x-request-id if it is 1 to 128 visible ASCII characters), binds it
    for the logs, echoes it, bounds the body and counts the answer."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, max_body_bytes: int) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin1")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        scope["request_id"] = request_id
        client_context.set(from_headers(headers))
        received = 0
        begun = False

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise BodyTooLongError
            return message

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, bounded, answer)
        except BodyTooLongError:
            limit = f"the body is longer than {self._max_body_bytes} bytes"
            await errors.response(HTTPError(413, limit, code="body_too_long"))(scope, receive, answer)
        except Exception as error:
            structlog.get_logger().exception("unexpected error")
            if begun:
                raise  # the server closes the connection, so that nobody takes a part for the whole
            failure = HTTPError(500, "internal error", code="internal")
            failure.may_retry = False
            failure.__cause__ = error
            await errors.response(failure)(scope, receive, answer)


def make_app(state: RouterState) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        await state.workers.start()
        yield
        await state.workers.close()

    app = FastAPI(title="dsv4-pd", version=VERSION, lifespan=lifespan, responses=ERROR_RESPONSES)
    if state.settings.otlp_endpoint:
        app.add_middleware(TraceMiddleware)
    app.add_middleware(ConnectionCloser, state=state)
    app.add_middleware(AccessMiddleware, keys=state.keys, metrics=state.metrics)
    app.add_middleware(RequestIdMiddleware, metrics=state.metrics, max_body_bytes=state.settings.max_body_bytes)
    _add_error_handlers(app)
    _add_operations(app, state)

    @app.post("/v1/completions", response_model=None, responses=answers_schema("text_completion"))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _complete(state, body, request)

    @app.post("/v1/chat/completions", response_model=None, responses=answers_schema("chat.completion"))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await _complete(state, body, request)

    return app


async def _complete(state: RouterState, body: CompletionRequest | ChatRequest, request: Request) -> Response:
    if state.draining:
        raise HTTPError(503, "this router is draining", code="draining", retry_after_s=1)
    if body.model is not None and body.model != state.model_name:
        raise HTTPError(404, f"the model {body.model!r} does not exist", "model", "model_not_found")
    if state.in_flight >= state.settings.max_in_flight:
        state.metrics.shed.inc()
        raise HTTPError(429, f"{state.in_flight} requests are in flight", code="saturated", retry_after_s=1)
    served = _Served(state)
    completion: Completion | None = None
    try:
        completion = await _make_completion(state, body, request)
        structlog.get_logger().info(
            "completion", completion=completion.id, choices=len(completion.choices), stream=bool(body.stream)
        )
        if not body.stream:
            answer = await unless_disconnected(request, completion.whole())
            served.end()
            return JSONResponse(answer)
        pieces = completion.pieces()
        try:
            # The status line is decided by what happens before the first token.
            first = await unless_disconnected(request, _first(pieces))
        except BaseException:
            await pieces.aclose()
            raise
        return EventStream(completion.events(first, pieces), pieces, served.end)
    except ServiceError as error:
        served.end()
        if completion is not None:
            completion.failed(error)
        raise errors.from_service_error(error, dispatched=completion is not None and completion.dispatched) from None
    except ClientGoneError:
        served.end()
        structlog.get_logger().info("client disconnected")
        return Response(status_code=CLIENT_CLOSED)
    except BaseException:
        served.end()
        raise


class _Served:
    """Counts a completion as in flight, from its making to its one end."""

    def __init__(self, state: RouterState) -> None:
        self._state = state
        self._begun = time.monotonic()
        self._over = False
        state.in_flight += 1
        state.metrics.in_flight.inc()

    def end(self) -> None:
        if self._over:
            return
        self._over = True
        self._state.in_flight -= 1
        self._state.metrics.in_flight.dec()
        self._state.metrics.seconds.observe(time.monotonic() - self._begun)


async def _first(pieces: AsyncGenerator[Piece]) -> Piece:
    return await anext(pieces)


async def _make_completion(state: RouterState, body: CompletionRequest | ChatRequest, request: Request) -> Completion:
    """Checks and tokenises; a long prompt beside the event loop: other clients' tokens go on meanwhile. Raises
    HTTPError 400."""
    context, vocab_size = state.max_context_tokens, state.config.vocab_size

    def make() -> Completion:
        if isinstance(body, ChatRequest):
            generation, prompt = chat_generation(body, state.chat_encoding, vocab_size, context)
            answers: Answers = ChatAnswers(generation, body, prompt, state.model_name, state.tokenizer)
        else:
            generation = text_generation(body, state.tokenizer, vocab_size)
            answers = TextAnswers(generation, body, state.model_name, state.tokenizer)
        generation.check(vocab_size, context)
        return Completion(
            generation,
            answers,
            state.config,
            state.tokenizer,
            state.workers,
            state.metrics,
            state.settings,
            request.scope["request_id"],
        )

    length = int(request.headers.get("content-length", LONG_BODY_BYTES))
    return make() if length < LONG_BODY_BYTES else await asyncio.to_thread(make)


def _add_error_handlers(app: FastAPI) -> None:
    async def http_error(_: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPError):
            raise error
        return errors.response(error)

    async def validation(_: Request, error: Exception) -> Response:
        problems = error.errors() if isinstance(error, RequestValidationError) else []
        return errors.response(errors.from_validation(problems))

    async def starlette_error(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = str(error.detail) if isinstance(error, HTTPException) else "error"
        answer = errors.response(HTTPError(status, detail))
        # A 405 names what is allowed.
        answer.headers.update((isinstance(error, HTTPException) and error.headers) or {})
        return answer

    app.add_exception_handler(HTTPError, http_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, starlette_error)


def _add_operations(app: FastAPI, state: RouterState) -> None:
    def model_object() -> dict[str, Any]:
        return {
            "id": state.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "dsv4-pd",
            "max_model_len": state.max_context_tokens,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_object()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != state.model_name:
            raise HTTPError(404, f"the model {name!r} does not exist", "model", "model_not_found")
        return model_object()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/ready", response_model=None, responses=READY_RESPONSES)
    async def ready() -> Response:
        usable = {
            "prefill": {w.address: w.trouble or "usable" for w in state.workers.prefill},
            "decode": {w.address: w.trouble or "usable" for w in state.workers.decode},
        }
        leaving = state.leaving or state.draining
        is_ready = state.workers.ready and not leaving
        shown = {"ready": is_ready, "draining": leaving, "workers": usable}
        return JSONResponse(shown) if is_ready else JSONResponse(shown, 503, {"retry-after": "1"})

    add_tokenisation(
        app, state.config, state.tokenizer, state.chat_encoding, state.model_name, lambda: state.max_context_tokens
    )

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {
            "version": VERSION,
            "model": model_object(),
            "chat_encoding": state.chat_encoding.name,
            "in_flight": state.in_flight,
            "max_in_flight": state.settings.max_in_flight,
            "workers": {
                role: [{"address": w.address, "usable": w.usable, "problem": w.trouble} for w in workers]
                for role, workers in (("prefill", state.workers.prefill), ("decode", state.workers.decode))
            },
        }

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.api_route("/metrics", methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(state.metrics.registry), media_type=CONTENT_TYPE_LATEST)
