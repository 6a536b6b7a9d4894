"""One prompt in the service, from its arrival until nothing of it is left: state, events, references.

Two kinds of threads touch a job: the engine's and the sender's. Its lock guards what both use. References are
held by the engine (while it may compute the job) and by every post (until it is drained); when the last one is
given back nothing of the request can be written any more, and `gone` resolves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import torch

from common.errors import ErrorReason, ServiceError
from common.sampling import SampledToken, SamplingState
from common.transfer.send_ring import SendRing, Span
from common.transfer.sender import Post, Receipt
from common.transfer.ticket import TransferTicket
from prefill_service.packing import SentRange
from prefill_service.sequence_kv import SequenceKV

Phase = Literal["queued", "computing", "sending", "ended"]


@dataclass(frozen=True)
class StartedEvent:
    queued_ns: int


@dataclass(frozen=True)
class PagesSentEvent:
    first_page: int
    page_count: int
    tokens_computed: int
    receipt: Receipt
    ranges: tuple[SentRange, ...]


@dataclass(frozen=True)
class DoneEvent:
    first_token: SampledToken
    prompt_logprobs: tuple[SampledToken, ...]
    ranges: tuple[SentRange, ...]
    queued_ns: int
    compute_ns: int
    exposed_transfer_ns: int
    bytes_sent: int
    last_chunk_unix_ns: int
    chunks: int
    transfer_ns: int
    rest_bytes: int
    seed: int


@dataclass(frozen=True)
class FailedEvent:
    error: ServiceError


Event = StartedEvent | PagesSentEvent | DoneEvent | FailedEvent


@dataclass
class SpanUse:
    """A span of the send ring, given back when its last user is done with it."""

    ring: SendRing
    span: Span
    users: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)

    def share(self) -> None:
        with self.lock:
            self.users += 1

    def release(self) -> None:
        with self.lock:
            self.users -= 1
            last = self.users == 0
        if last:
            self.ring.release(self.span)


class PrefillJob:
    """`key` is unique among living jobs. `emit` takes events from any thread and must not block."""

    def __init__(
        self,
        key: str,
        request_id: str,
        token_ids: list[int],
        sampling: SamplingState,
        ticket: TransferTicket,
        transfer_timeout_s: float,
        emit: Callable[[Event], None],
        on_gone: Callable[[PrefillJob], None],
    ) -> None:
        self.key = key
        self.request_id = request_id
        self.token_ids = torch.tensor(token_ids, dtype=torch.int64)
        self.sampling = sampling
        self.ticket = ticket
        self.transfer_timeout_s = transfer_timeout_s
        self.kv: SequenceKV | None = None
        self.computed = 0
        # Jobs with the same prompt that are computed with this one; each has its own pages, token and end.
        self.sharers: list[PrefillJob] = []
        self.gone: Future[None] = Future()
        self.arrived_ns = time.time_ns()
        self._emit = emit
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._references = 1
        self._phase: Phase = "queued"
        self._started_ns = 0
        self._computed_ns = 0
        self._unlanded = 0
        self._bytes = 0
        self._transfer_ns = 0
        self._rest_bytes = 0
        self._chunks = 0
        self._writes_failed = False
        self._rest: tuple[SentRange, ...] = ()
        self._first_token: SampledToken | None = None
        self.prompt_logprobs: list[SampledToken] = []

    @property
    def tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def phase(self) -> Phase:
        with self._lock:
            return self._phase

    @property
    def writes_failed(self) -> bool:
        """A write failed: bytes of it may be on the network although none is alive here. Final once `gone`."""
        with self._lock:
            return self._writes_failed

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.settings.prompt_logprobs is not None

    def computes_the_same(self, other: PrefillJob) -> bool:
        return self.wants_prompt_logprobs == other.wants_prompt_logprobs and torch.equal(
            self.token_ids, other.token_ids
        )

    def hand_on(self) -> PrefillJob:
        """The first sharer, which goes on with what was computed so far."""
        heir, *heir.sharers = self.sharers
        heir.kv, heir.computed = self.kv, self.computed
        self.kv, self.sharers = None, []
        return heir

    def start(self) -> None:
        """The engine begins with it."""
        with self._lock:
            if self._phase == "ended":
                return
            self._phase = "computing"
            self._started_ns = time.time_ns()
        self._emit(StartedEvent(self._started_ns - self.arrived_ns))

    def chunk_done(self) -> None:
        with self._lock:
            self._chunks += 1
            self._computed_ns = time.time_ns()

    def add_post(
        self, post: Post, use: SpanUse, ranges: list[SentRange], pages: tuple[int, int] | None, computed: int
    ) -> None:
        """Follows a post: a PagesSentEvent when it lands (pages = first page and count), failure when it fails,
        its span and its reference back when it is drained."""
        with self._lock:
            self._references += 1
            self._unlanded += 1
            if pages is None:
                self._rest = tuple(ranges)
        use.share()

        def landed(future: Future[Receipt]) -> None:
            error = future.exception()
            if error is None:
                self._landed(future.result(), ranges, pages, computed)
            else:
                self.fail(_service_error(error))

        def drained(_: Future[None]) -> None:
            if post.failed:
                with self._lock:
                    self._writes_failed = True
            use.release()
            self.release()

        post.done.add_done_callback(landed)
        post.drained.add_done_callback(drained)

    def computed_last(self, first_token: SampledToken) -> None:
        """The last chunk is computed and all its posts are made."""
        with self._lock:
            if self._phase == "ended":
                return
            self._phase = "sending"
            self._first_token = first_token
        self._finish_if_landed()

    def join(self, others: int) -> None:
        """So many other processes compute and send their share: each holds a reference and has something to send."""
        with self._lock:
            self._references += others
            self._unlanded += others

    def other_sent(self, event: PagesSentEvent) -> None:
        """A post of another process landed."""
        with self._lock:
            self._bytes += event.receipt.size
            ended = self._phase == "ended"
        if not ended:
            self._emit(event)

    def other_finished(self, ranges: tuple[SentRange, ...], rest_bytes: int) -> None:
        """All that another process had to send landed, the last of it being `ranges`."""
        now = time.time_ns()
        self.other_sent(PagesSentEvent(0, 0, self.tokens, Receipt(rest_bytes, now, now), ranges))
        with self._lock:
            self._unlanded -= 1
        self._finish_if_landed()

    def other_gone(self, writes_failed: bool) -> None:
        """Another process gives its reference back."""
        with self._lock:
            self._writes_failed = self._writes_failed or writes_failed
        self.release()

    def fail(self, error: ServiceError) -> bool:
        """Ends the job; only the first end counts. Returns whether this was it."""
        if not self._end():
            return False
        self._emit(FailedEvent(error))
        return True

    def cancel(self) -> bool:
        return self.fail(ServiceError(ErrorReason.CANCELLED, f"request {self.request_id} is cancelled"))

    def release(self) -> None:
        """Gives one reference back."""
        with self._lock:
            self._references -= 1
            last = self._references == 0
        if last:
            self._on_gone(self)
            self.gone.set_result(None)

    def _end(self) -> bool:
        with self._lock:
            if self._phase == "ended":
                return False
            self._phase = "ended"
            return True

    def _landed(self, receipt: Receipt, ranges: list[SentRange], pages: tuple[int, int] | None, computed: int) -> None:
        with self._lock:
            self._unlanded -= 1
            self._bytes += receipt.size
            if pages is None:
                self._rest_bytes += receipt.size
            self._transfer_ns += receipt.landed_unix_ns - receipt.posted_unix_ns
            ended = self._phase == "ended"
        if pages is not None and not ended:
            self._emit(PagesSentEvent(pages[0], pages[1], computed, receipt, tuple(ranges)))
        self._finish_if_landed()

    def _finish_if_landed(self) -> None:
        with self._lock:
            if self._phase != "sending" or self._unlanded or self._first_token is None:
                return
            self._phase = "ended"
            now = time.time_ns()
            done = DoneEvent(
                first_token=self._first_token,
                prompt_logprobs=tuple(self.prompt_logprobs),
                ranges=self._rest,
                queued_ns=self._started_ns - self.arrived_ns,
                compute_ns=self._computed_ns - self._started_ns,
                exposed_transfer_ns=now - self._computed_ns,
                bytes_sent=self._bytes,
                last_chunk_unix_ns=self._computed_ns,
                chunks=self._chunks,
                transfer_ns=self._transfer_ns,
                rest_bytes=self._rest_bytes,
                seed=self.sampling.settings.seed,
            )
        self._emit(done)


def _service_error(error: BaseException) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    return ServiceError(ErrorReason.TRANSFER_FAILED, repr(error))
