"""What the choice of a worker needs to know of the HTTP request, whichever endpoint it came through."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

SESSION_HEADER = b"x-session-id"
MAX_SESSION_BYTES = 128


@dataclass(frozen=True)
class ClientContext:
    session: str = ""
    """Requests of one session go to the same workers as long as these have room."""


client_context: ContextVar[ClientContext] = ContextVar("client_context", default=ClientContext())  # noqa: B039 - frozen


def from_headers(headers: dict[bytes, bytes]) -> ClientContext:
    """A session id that is too long counts as none: it would only cost time to hash."""
    session = headers.get(SESSION_HEADER, b"")
    return ClientContext(session.decode("latin1") if len(session) <= MAX_SESSION_BYTES else "")
