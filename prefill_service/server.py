"""The gRPC side of the prefill service: checks requests, streams their events, cancels and drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import structlog

from common.errors import ErrorReason, ServiceError
from common.model.config import ModelConfig
from common.rpc import layout_messages, sampling_messages, ticket_messages
from common.rpc.errors import abort
from common.rpc.gen.dsv4pd.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from common.rpc.worker import Context
from common.sampling import SamplingState
from common.transfer.layout import HandoverLayout
from common.transfer.ticket import TransferTicket
from prefill_service.engine import PrefillEngine
from prefill_service.job import DoneEvent, Event, FailedEvent, PagesSentEvent, PrefillJob, StartedEvent
from prefill_service.metrics import PrefillMetrics
from prefill_service.packing import SentRange
from prefill_service.settings import PrefillSettings

QUEUED_EVENTS = 4096


def job_key(key: common_pb2.RequestKey) -> str:
    return f"{key.request_id}#{key.generation}"


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(
        self,
        settings: PrefillSettings,
        config: ModelConfig,
        layout: HandoverLayout,
        incarnation: common_pb2.Incarnation,
        engine: PrefillEngine,
        metrics: PrefillMetrics,
        max_context_tokens: int,
    ) -> None:
        self.draining = False
        self._settings = settings
        self._config = config
        self._layout = layout
        self._incarnation = incarnation
        self._engine = engine
        self._metrics = metrics
        self._max_context_tokens = max_context_tokens

    async def Hello(self, request: prefill_pb2.HelloRequest, context: Context) -> prefill_pb2.HelloReply:
        try:
            layout_messages.check_same(self._layout, layout_messages.from_message(request.layout), "the caller")
        except ServiceError as error:
            structlog.get_logger().error("layout mismatch", peer=context.peer(), field=error.field, detail=str(error))
            await abort(context, error)
        return prefill_pb2.HelloReply(callee=self._incarnation, layout=layout_messages.to_message(self._layout))

    async def Cancel(self, request: prefill_pb2.CancelRequest, context: Context) -> prefill_pb2.CancelReply:
        key = job_key(request.key)
        if not request.key.request_id:
            await abort(context, ServiceError(ErrorReason.INVALID_REQUEST, "key is empty", field="key"))
        job = self._engine.cancel(key)
        state = prefill_pb2.CancelReply.STATE_UNKNOWN
        if job is not None:
            timeout = request.drain_timeout_s or self._settings.drain_timeout_s
            try:
                await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(job.gone)), timeout)
            except TimeoutError:
                self._metrics.deadlines.labels("drain").inc()
                error = ServiceError(
                    ErrorReason.DEADLINE_EXCEEDED,
                    f"writes of {key} are still in flight after {timeout:g} s",
                    field="drain_timeout_s",
                )
                await abort(context, error)
            state = prefill_pb2.CancelReply.STATE_DRAINED
        if self._engine.writes_failed(key):
            state = prefill_pb2.CancelReply.STATE_DRAINED_AFTER_FAILURE
        return prefill_pb2.CancelReply(state=state, callee=self._incarnation)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        structlog.contextvars.bind_contextvars(request_id=request.key.request_id)
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue(QUEUED_EVENTS)

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            job = self._make_job(request, emit)
            requests_ahead, tokens_ahead = self._engine.submit(job)
        except ServiceError as error:
            self._metrics.failures.labels(error.reason.name.lower()).inc()
            await abort(context, error)
        queued = prefill_pb2.Queued(requests_ahead=requests_ahead, tokens_ahead=tokens_ahead)
        try:
            yield self._message(request.key, queued=queued)
            async for event in self._events(job, events, request):
                if isinstance(event, FailedEvent):
                    if event.error.reason is ErrorReason.DEADLINE_EXCEEDED:
                        self._metrics.deadlines.labels(event.error.field.removesuffix("_timeout_s")).inc()
                    self._metrics.failures.labels(event.error.reason.name.lower()).inc()
                    structlog.get_logger().warning("prefill failed", reason=event.error.reason.name, detail=str(event))
                    await abort(context, event.error)
                yield self._event_message(request.key, event)
        finally:
            # Also when the caller went away: nothing more is posted, what is in flight drains by itself.
            if job.phase != "ended":
                self._engine.cancel(job.key)

    def _make_job(self, request: prefill_pb2.PrefillRequest, emit: Callable[[Event], None]) -> PrefillJob:
        """Checks everything before any work. Raises ServiceError."""
        if self.draining:
            raise ServiceError(ErrorReason.DRAINING, "this prefill service is draining", retry_after_s=1.0)
        if not request.key.request_id:
            raise ServiceError(ErrorReason.INVALID_REQUEST, "key.request_id is empty", field="key.request_id")
        expected = request.expected_incarnation
        if expected and expected != self._incarnation.id:
            raise ServiceError(
                ErrorReason.STALE_GENERATION,
                f"the caller means prefill incarnation {expected}, this one is {self._incarnation.id}",
                field="expected_incarnation",
                ours=self._incarnation.id,
                theirs=expected,
            )
        tokens = list(request.token_ids)
        if not tokens:
            raise ServiceError(ErrorReason.INVALID_REQUEST, "token_ids is empty", field="token_ids")
        if len(tokens) > self._max_context_tokens:
            raise ServiceError(
                ErrorReason.CONTEXT_TOO_LONG,
                f"a prompt of {len(tokens)} tokens is longer than {self._max_context_tokens}",
                field="token_ids",
                ours=self._max_context_tokens,
                theirs=len(tokens),
            )
        if max(tokens) >= self._config.vocab_size:
            raise ServiceError(
                ErrorReason.INVALID_REQUEST,
                f"token id {max(tokens)} is not in the vocabulary of {self._config.vocab_size}",
                field="token_ids",
                theirs=max(tokens),
            )
        sampling = sampling_messages.from_message(request.sampling)
        sampling.check(self._config.vocab_size)
        return PrefillJob(
            key=job_key(request.key),
            request_id=request.key.request_id,
            token_ids=tokens,
            sampling=SamplingState(sampling, tokens, self._config.eos_token_id),
            ticket=self._ticket(request, len(tokens)),
            transfer_timeout_s=request.transfer_timeout_s or self._settings.transfer_timeout_s,
            emit=emit,
            on_gone=self._engine.gone,
        )

    def _ticket(self, request: prefill_pb2.PrefillRequest, tokens: int) -> TransferTicket:
        try:
            ticket = ticket_messages.from_message(request.ticket)
            ticket.check(tokens, self._layout.ratios)
        except ValueError as error:
            raise ServiceError(ErrorReason.INVALID_REQUEST, f"ticket: {error}", field="ticket") from None
        if not ticket.session:
            raise ServiceError(ErrorReason.INVALID_REQUEST, "ticket.session is empty", field="ticket.session")
        return ticket

    async def _events(
        self, job: PrefillJob, events: asyncio.Queue[Event], request: prefill_pb2.PrefillRequest
    ) -> AsyncIterator[Event]:
        """The job's events until it ends; its deadlines end it too. Time in the queue counts for the queue alone."""
        queue_timeout = request.queue_timeout_s or self._settings.queue_timeout_s
        prefill_timeout = request.prefill_timeout_s or self._settings.prefill_timeout_s
        end, phase, limit = time.monotonic() + queue_timeout, "queue", queue_timeout
        while True:
            try:
                event = await asyncio.wait_for(events.get(), max(0.0, end - time.monotonic()))
            except TimeoutError:
                self._engine.cancel(job.key)
                yield FailedEvent(
                    ServiceError(
                        ErrorReason.DEADLINE_EXCEEDED,
                        f"{phase} deadline of {limit:g} s passed",
                        field=f"{phase}_timeout_s",
                        ours=limit,
                    )
                )
                return
            if isinstance(event, StartedEvent):
                end, phase, limit = time.monotonic() + prefill_timeout, "prefill", prefill_timeout
                self._metrics.queue_seconds.observe(event.queued_ns / 1e9)
            if isinstance(event, DoneEvent):
                self._metrics.prefill_seconds.observe(event.compute_ns / 1e9)
                self._metrics.exposed_seconds.observe(event.exposed_transfer_ns / 1e9)
                self._metrics.sent_bytes.inc(event.bytes_sent)
                self._metrics.done.inc()
            yield event
            if isinstance(event, DoneEvent | FailedEvent):
                return

    def _event_message(self, key: common_pb2.RequestKey, event: Event) -> prefill_pb2.PrefillEvent:
        if isinstance(event, StartedEvent):
            return self._message(key, started=prefill_pb2.Started(queued_ns=event.queued_ns))
        if isinstance(event, PagesSentEvent):
            return self._message(
                key,
                pages_sent=prefill_pb2.PagesSent(
                    first_page=event.first_page,
                    page_count=event.page_count,
                    tokens_computed=event.tokens_computed,
                    posted_unix_ns=event.receipt.posted_unix_ns,
                    landed_unix_ns=event.receipt.landed_unix_ns,
                    bytes=event.receipt.size,
                    digests=[_digest_message(sent) for sent in event.ranges],
                ),
            )
        if isinstance(event, DoneEvent):
            return self._message(
                key,
                done=prefill_pb2.Done(
                    first_token=event.first_token.token_id,
                    logprobs=sampling_messages.token_to_message(event.first_token),
                    digests=[_digest_message(sent) for sent in event.ranges],
                    seed=event.seed,
                    prompt_logprobs=sampling_messages.tokens_to_messages(event.prompt_logprobs),
                    timings=prefill_pb2.PrefillTimings(
                        queued_ns=event.queued_ns,
                        compute_ns=event.compute_ns,
                        exposed_transfer_ns=event.exposed_transfer_ns,
                        bytes_sent=event.bytes_sent,
                        last_chunk_unix_ns=event.last_chunk_unix_ns,
                        chunks=event.chunks,
                        transfer_ns=event.transfer_ns,
                    ),
                ),
            )
        raise ValueError(f"no message for {event}")

    def _message(
        self,
        key: common_pb2.RequestKey,
        *,
        queued: prefill_pb2.Queued | None = None,
        started: prefill_pb2.Started | None = None,
        pages_sent: prefill_pb2.PagesSent | None = None,
        done: prefill_pb2.Done | None = None,
    ) -> prefill_pb2.PrefillEvent:
        return prefill_pb2.PrefillEvent(
            key=key, unix_ns=time.time_ns(), queued=queued, started=started, pages_sent=pages_sent, done=done
        )


def _digest_message(sent: SentRange) -> prefill_pb2.RangeDigest:
    return prefill_pb2.RangeDigest(
        layer_id=sent.layer,
        kind=common_pb2.RegionKind.Name(sent.kind.value),
        first=sent.first,
        count=sent.count,
        digest=sent.digest,
    )
