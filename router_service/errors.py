"""Errors as OpenAI clients expect them: {"error": {message, type, param, code}} and a fitting status."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from common.errors import ErrorReason, ServiceError

_STATUS: dict[ErrorReason, int] = {
    ErrorReason.INVALID_REQUEST: 400,
    ErrorReason.CONTEXT_TOO_LONG: 400,
    ErrorReason.POOL_EXHAUSTED: 400,
    ErrorReason.NOT_FOUND: 404,
    ErrorReason.QUEUE_FULL: 429,
    ErrorReason.DUPLICATE_REQUEST: 409,
    ErrorReason.DRAINING: 503,
    ErrorReason.PREFILL_UNAVAILABLE: 503,
    ErrorReason.DECODE_UNAVAILABLE: 503,
    ErrorReason.DEADLINE_EXCEEDED: 504,
    ErrorReason.PREFILL_FAILED: 502,
    ErrorReason.TRANSFER_FAILED: 502,
    ErrorReason.DIGEST_MISMATCH: 502,
    ErrorReason.LAYOUT_MISMATCH: 502,
}
_TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}
# A worker that answers so has done nothing for the request yet.
_REFUSALS = (ErrorReason.QUEUE_FULL, ErrorReason.DRAINING)


class HTTPError(Exception):
    """An error that is answered as it stands."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: float = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.may_retry = True


def bad_request(message: str, param: str | None, code: str | None = None) -> HTTPError:
    return HTTPError(400, message, param, code)


def from_service_error(error: ServiceError, *, dispatched: bool) -> HTTPError:
    """A worker's error: 4xx where the client is at fault, 429 saturated, 503 nobody there, 504 deadline.

    `dispatched`: a worker had begun with the request, so that sending it again would do it twice.
    """
    status = _STATUS.get(error.reason, 500)
    retry = error.retry_after_s or (1.0 if status in (429, 503) else 0.0)
    made = HTTPError(status, error.message, error.field or None, error.reason.name.lower(), retry)
    made.may_retry = error.reason in _REFUSALS or (status == 503 and not dispatched)
    return made


def body(error: HTTPError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    param = None if error.param is None else _printable(error.param)
    return {"error": {"message": _printable(error.message), "type": kind, "param": param, "code": error.code}}


def response(error: HTTPError) -> JSONResponse:
    headers = {}
    if error.retry_after_s:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.status >= 500 and not error.may_retry:
        # Work was dispatched: sending the same request again may do it twice.
        headers["x-should-retry"] = "false"
    return JSONResponse(body(error), error.status, headers)


def _printable(text: str) -> str:
    """JSON can spell half a surrogate pair, UTF-8 can't: it is shown as its escape."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def from_validation(problems: Sequence[Mapping[str, Any]]) -> HTTPError:
    """The first problem that pydantic found in a body, by the parameter's name."""
    problem = problems[0]
    place = [str(part) for part in problem["loc"] if part != "body"]
    param = place[0] if place else None
    kind = problem["type"]
    if kind == "extra_forbidden":
        param = ".".join(place)
    if kind == "json_invalid":
        return bad_request(f"the body is not JSON: {problem.get('ctx', {}).get('error', '')}", None)
    if kind == "extra_forbidden":
        return bad_request(f"unknown parameter: {param}", param, "unknown_parameter")
    if kind == "missing":
        return bad_request(f"missing required parameter: {param or 'body'}", param, "missing_required_parameter")
    shown = repr(problem.get("input"))
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return bad_request(f"{param or 'body'}: {problem['msg']} (got {shown})", param, "invalid_value")
