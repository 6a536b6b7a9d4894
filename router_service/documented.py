"""What the OpenAPI document says of answers: schemas that the framework can't read off the code."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Responses = dict[int | str, dict[str, Any]]


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorObject


ERROR_RESPONSES: Responses = {
    "4XX": {"model": ErrorBody, "description": "the request is at fault, or 429: saturated"},
    "5XX": {"model": ErrorBody, "description": "a worker failed, or there is none"},
}
_READY: dict[str, Any] = {
    "type": "object",
    "required": ["ready", "draining", "workers"],
    "properties": {"ready": {"type": "boolean"}, "draining": {"type": "boolean"}, "workers": {"type": "object"}},
}
READY_RESPONSES: Responses = {
    200: {"description": "requests can be served", "content": {"application/json": {"schema": _READY}}},
    503: {"description": "they can't", "content": {"application/json": {"schema": _READY}}},
}


def answers_schema(kind: str) -> Responses:
    """Of an answer at once, an object of this kind, or as server-sent events."""
    count = {"type": "integer", "minimum": 0}
    usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), count)
    schema = {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["index", "finish_reason", "message" if kind == "chat.completion" else "text"],
                    "properties": {"index": count, "finish_reason": {"enum": ["stop", "length", "abort"]}},
                },
            },
            "usage": {"type": "object", "required": list(usage), "properties": usage},
        },
    }
    events = {"schema": {"type": "string"}}
    return {
        200: {"description": "made", "content": {"application/json": {"schema": schema}, "text/event-stream": events}}
    }
