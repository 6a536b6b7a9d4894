"""Typed errors. Each carries its reason, the values that disagree and, where it helps, when to retry.

The gRPC mapping is in `common.rpc.errors`, the HTTP mapping in `router_service.errors`.
"""

from __future__ import annotations

from enum import Enum


class ErrorReason(Enum):
    """Why a request or a process failed; names match dsv4pd.v1.ErrorReason."""

    INVALID_REQUEST = 1
    CONTEXT_TOO_LONG = 2
    QUEUE_FULL = 3
    POOL_EXHAUSTED = 4
    LAYOUT_MISMATCH = 5
    PREFILL_UNAVAILABLE = 6
    PREFILL_FAILED = 7
    TRANSFER_FAILED = 8
    DIGEST_MISMATCH = 9
    DEADLINE_EXCEEDED = 10
    CANCELLED = 11
    DUPLICATE_REQUEST = 12
    STALE_GENERATION = 13
    DRAINING = 14
    NOT_FOUND = 15
    INTERNAL = 16
    DECODE_UNAVAILABLE = 17


# Who answers so has not begun.
_REFUSALS = (ErrorReason.QUEUE_FULL, ErrorReason.DRAINING)


class ServiceError(Exception):
    """An error with a reason that every service and client can act on.

    `field` names what is at fault, `ours` and `theirs` are the values that disagree (as text),
    `retry_after_s` is a hint in seconds, 0 where retrying at once is as good. `not_begun`: nothing was done for the
    request, so that sending it elsewhere does nothing twice.
    """

    def __init__(
        self,
        reason: ErrorReason,
        message: str,
        *,
        field: str = "",
        ours: object = "",
        theirs: object = "",
        retry_after_s: float = 0.0,
        not_begun: bool = False,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.ours = str(ours)
        self.theirs = str(theirs)
        self.retry_after_s = retry_after_s
        self.not_begun = not_begun or reason in _REFUSALS

    def __repr__(self) -> str:
        return f"ServiceError({self.reason.name}, {self.message!r}, field={self.field!r})"
