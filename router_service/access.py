"""Who may come in, and how much at a time: API keys, their concurrency and their rate."""

from __future__ import annotations

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from router_service import errors
from router_service.api_keys import ApiKeys, Usage
from router_service.errors import HTTPError
from router_service.metrics import RouterMetrics

# For balancers, probes and scrapers, which have no key.
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
BUSY_RETRY_S = 1.0


class AccessMiddleware:
    """Answers 401 without a known key and 429 beyond its limits. Without a file of keys everybody may come in."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, metrics: RouterMetrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys is None or scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            usage = self._authenticate(self._keys, scope)
            works = scope["method"] == "POST"
            if works:
                self._admit(self._keys, usage)
        except HTTPError as error:
            answer = errors.response(error)
            if error.status == 401:
                answer.headers["www-authenticate"] = "Bearer"
            await answer(scope, receive, send)
            return
        structlog.contextvars.bind_contextvars(key=usage.key.name)
        usage.running += works
        try:
            await self._app(scope, receive, send)
        finally:
            usage.running -= works

    def _authenticate(self, keys: ApiKeys, scope: Scope) -> Usage:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, secret = given.partition(b" ")
        usage = keys.find(secret.strip()) if kind.lower() == b"bearer" else None
        if usage is None:
            problem = "incorrect API key" if given else "no API key: send it as Authorization: Bearer KEY"
            raise HTTPError(401, problem, code="invalid_api_key")
        return usage

    def _admit(self, keys: ApiKeys, usage: Usage) -> None:
        """Takes one request from the key's rate. Raises HTTPError 429."""
        if usage.is_full:
            self._metrics.shed.inc()
            raise HTTPError(
                429,
                f"{usage.running} requests with this key are running, it may have {usage.key.max_concurrent}",
                code="too_many_requests",
                retry_after_s=BUSY_RETRY_S,
            )
        wait_s = usage.wait_s(keys.now())
        if wait_s > 0:
            self._metrics.shed.inc()
            raise HTTPError(
                429,
                f"this key may send {usage.key.requests_per_minute:g} requests a minute",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        usage.allowance -= bool(usage.key.requests_per_minute)
