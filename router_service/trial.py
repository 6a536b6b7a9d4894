"""What a request's end says about the two workers it was sent to."""

from __future__ import annotations

from opentelemetry.trace import SpanKind

from common import tracing
from common.errors import ErrorReason, ServiceError
from router_service.worker import Worker

_DECODE = frozenset({ErrorReason.DECODE_UNAVAILABLE, ErrorReason.INTERNAL})
_PREFILL = frozenset({ErrorReason.PREFILL_UNAVAILABLE, ErrorReason.PREFILL_FAILED})
# The pair failed; which of the two is at fault shows in their other requests.
_BOTH = frozenset({ErrorReason.TRANSFER_FAILED, ErrorReason.DIGEST_MISMATCH, ErrorReason.LAYOUT_MISMATCH})
_QUEUES = ("queue_timeout_s",)


def may_go_elsewhere(error: ServiceError, *, reserved: bool) -> bool:
    """Whether another worker may be asked: nobody has begun. A decode worker that goes away before its first event
    takes what it may have begun with it."""
    return error.not_begun or (error.reason is ErrorReason.DECODE_UNAVAILABLE and not reserved)


class Trial:
    """One request at a decode and a prefill worker, for their breakers. Call `end` in any case."""

    def __init__(self, decode: Worker, prefill: Worker) -> None:
        self.decode = decode
        self.prefill = prefill
        self.reserved = False
        """Decode has memory for it, and what fails now may be prefill."""
        self.span = tracing.child("generate", kind=SpanKind.CLIENT)
        self._over = False
        for worker in (decode, prefill):
            worker.breaker.begin()

    def succeeded(self) -> None:
        self._over = True
        for worker in (self.decode, self.prefill):
            worker.breaker.succeeded()

    def failed(self, error: ServiceError) -> None:
        """Counts it where it is a worker's fault: what is answered with 4xx, draining and full queues never are."""
        self._over = True
        tracing.fail(self.span, error.reason.name)
        blamed = self._blamed(error)
        for worker in (self.decode, self.prefill):
            if worker in blamed:
                worker.breaker.failed()
            else:
                worker.breaker.left()
        if error.reason is ErrorReason.DRAINING:
            (self.prefill if self.reserved else self.decode).lost("draining")
        elif error.reason is ErrorReason.PREFILL_UNAVAILABLE:
            self.prefill.lost(error.message)
        elif error.reason is ErrorReason.DECODE_UNAVAILABLE:
            self.decode.lost(error.message)

    def end(self) -> None:
        """Without a verdict, where there was none yet: the client left."""
        self.span.set_attributes({"decode": self.decode.address, "prefill": self.prefill.address})
        self.span.end()
        if not self._over:
            self._over = True
            self.decode.breaker.left()
            self.prefill.breaker.left()

    def _blamed(self, error: ServiceError) -> tuple[Worker, ...]:
        if error.reason in _DECODE:
            return (self.decode,)
        if error.reason in _PREFILL:
            return (self.prefill,)
        if error.reason in _BOTH:
            return (self.decode, self.prefill)
        if error.reason is ErrorReason.DEADLINE_EXCEEDED and error.field not in _QUEUES:
            return (self.prefill,) if error.field else (self.decode,)
        return ()
