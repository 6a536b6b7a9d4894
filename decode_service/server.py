"""The gRPC side of the decode service: one Generate call owns one request from reservation to last token."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable

import structlog

from common.errors import ErrorReason, ServiceError
from common.kv.handover import Handover
from common.model.config import ModelConfig
from common.rpc import sampling_messages
from common.rpc.errors import abort
from common.rpc.gen.dsv4pd.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from common.rpc.tls import Tls
from common.rpc.worker import Context
from common.sampling import SampledToken, SamplingState
from common.transfer.landed_memory import LandedMemory
from common.transfer.layout import HandoverLayout
from common.transfer.ticket import RegionTable, TransferTicket
from decode_service.engine import DecodeEngine
from decode_service.landings import Landings
from decode_service.metrics import DecodeMetrics
from decode_service.prefill_client import Prefilled, PrefillPeer
from decode_service.quarantine import Quarantine
from decode_service.request import DecodeRequest, Event, FailedEvent, FinishedEvent, ReservedEvent, TokenEvent
from decode_service.resources import RequestResources
from decode_service.settings import DecodeSettings

_REASONS = {
    "stop": decode_pb2.FINISH_REASON_STOP,
    "length": decode_pb2.FINISH_REASON_LENGTH,
    "abort": decode_pb2.FINISH_REASON_ABORT,
}
RETRY_S = 0.2


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(
        self,
        settings: DecodeSettings,
        config: ModelConfig,
        layout: HandoverLayout,
        incarnation: common_pb2.Incarnation,
        engine: DecodeEngine,
        regions: RegionTable,
        landings: Landings,
        metrics: DecodeMetrics,
        memory: LandedMemory,
        tls: Tls | None = None,
    ) -> None:
        self.draining = False
        self._tls = tls
        self._settings = settings
        self._config = config
        self._layout = layout
        self._incarnation = incarnation
        self._engine = engine
        self._regions = regions
        self._landings = landings
        self._quarantine = Quarantine(settings.quarantine_alarm_s, settings.quarantine_max_share)
        self._metrics = metrics
        self._memory = memory
        self._peers: dict[str, PrefillPeer] = {}
        self._endings: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Waits for requests that are being given back, then closes the channels."""
        if self._endings:
            await asyncio.wait(self._endings, timeout=5.0)
        for peer in self._peers.values():
            await peer.close()

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        structlog.contextvars.bind_contextvars(request_id=request.request_id)
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        peer: PrefillPeer | None = None
        mine: DecodeRequest | None = None
        try:
            peer = self._peer(request.prefill_address or self._settings.prefill_address)
            made = self._make_request(request, emit)
            self._engine.submit(made)
            mine = made
            async for message in self._serve(mine, peer, events, request.queue_timeout_s):
                yield message
            mine.answered = True
        except ServiceError as error:
            self._metrics.failures.labels(error.reason.name.lower()).inc()
            structlog.get_logger().warning("request failed", reason=error.reason.name, detail=error.message)
            if mine is not None:
                mine.answered = True
            await abort(context, error)
        finally:
            # Also when the client left: the request's memory comes back behind the scenes, once.
            if mine is not None and peer is not None and mine.phase != "ended":
                if not mine.answered:
                    self._metrics.failures.labels("client_left").inc()
                mine.answered = True
                self._end_later(mine, peer)

    def _make_request(self, request: decode_pb2.GenerateRequest, emit: Callable[[Event], None]) -> DecodeRequest:
        if self.draining:
            raise ServiceError(ErrorReason.DRAINING, "this decode service is draining", retry_after_s=1.0)
        if not request.request_id:
            raise ServiceError(ErrorReason.INVALID_REQUEST, "request_id is empty", field="request_id")
        tokens = list(request.token_ids)
        if not tokens:
            raise ServiceError(ErrorReason.INVALID_REQUEST, "the prompt is empty", field="prompt")
        if max(tokens) >= self._config.vocab_size:
            raise ServiceError(
                ErrorReason.INVALID_REQUEST,
                f"token id {max(tokens)} is not in the vocabulary of {self._config.vocab_size}",
                field="prompt",
                theirs=max(tokens),
            )
        sampling = sampling_messages.from_message(request.sampling)
        sampling.check(self._config.vocab_size)
        state = SamplingState(sampling, tokens, self._config.eos_token_id)
        return DecodeRequest(request.request_id, secrets.randbits(63), tokens, state, emit)

    async def _serve(
        self, mine: DecodeRequest, peer: PrefillPeer, events: asyncio.Queue[Event], queue_timeout_s: float
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        reserved = await self._next(events, queue_timeout_s or self._settings.queue_timeout_s)
        if isinstance(reserved, FinishedEvent):
            yield self._finished(mine, reserved, None, 0)
            return
        if not isinstance(reserved, ReservedEvent):
            raise ServiceError(ErrorReason.INTERNAL, f"unexpected {type(reserved).__name__} before memory was reserved")
        self._metrics.queue_seconds.observe(reserved.queued_ns / 1e9)
        yield _message(
            reserved=decode_pb2.Reserved(
                key=common_pb2.RequestKey(request_id=mine.request_id, generation=mine.generation),
                queued_ns=reserved.queued_ns,
                host_pages=len(reserved.resources.host_pages),
                logical_pages=len(reserved.resources.logical_pages),
            )
        )
        prefilled = await self._prefill(mine, peer, events, reserved.resources)
        if isinstance(prefilled, FinishedEvent):
            yield self._finished(mine, prefilled, None, reserved.queued_ns)
            return
        self._metrics.handover_seconds.observe(prefilled.handover_ns / 1e9)
        self._engine.admit(mine, prefilled.first_token)
        prompt_logprobs = sampling_messages.tokens_to_messages(prefilled.prompt_logprobs)
        finished: FinishedEvent | None = None
        while finished is None:
            # Whatever has been made since the last message goes out in one.
            pending = [await events.get()]
            while not events.empty():
                pending.append(events.get_nowait())
            tokens: list[SampledToken] = []
            for event in pending:
                if isinstance(event, TokenEvent):
                    tokens.append(event.token)
                elif isinstance(event, FinishedEvent):
                    finished = event
                elif isinstance(event, FailedEvent):
                    raise event.error
            if tokens:
                yield _message(tokens=self._tokens(mine, tokens, prompt_logprobs))
                prompt_logprobs = []
        yield self._finished(mine, finished, prefilled, reserved.queued_ns)

    async def _next(self, events: asyncio.Queue[Event], timeout_s: float) -> Event:
        try:
            event = await asyncio.wait_for(events.get(), timeout_s)
        except TimeoutError:
            self._metrics.deadlines.labels("reserve").inc()
            raise ServiceError(
                ErrorReason.DEADLINE_EXCEEDED,
                f"no memory came free within the queue's {timeout_s:g} s",
                field="queue_timeout_s",
                ours=timeout_s,
                retry_after_s=1.0,
            ) from None
        if isinstance(event, FailedEvent):
            raise event.error
        return event

    async def _prefill(
        self, mine: DecodeRequest, peer: PrefillPeer, events: asyncio.Queue[Event], resources: RequestResources
    ) -> Prefilled | FinishedEvent:
        """Runs the handover; an abort by an operator ends the wait."""
        handover, first = Handover(mine.prompt_tokens), len(resources.prefix)
        ticket = TransferTicket(
            session="",
            receiver_id=self._incarnation.id,
            regions=self._regions,
            host_pages=tuple(resources.staging_pages or resources.host_pages[first : handover.host_pages]),
            logical_pages=tuple(resources.logical_pages[first : handover.logical_pages]),
            window_slot=resources.window_slot,
            state_slot=resources.state_slot,
            verify=self._settings.verify,
            first_page=first,
        )
        # The slot's state is cleared on the device; a writer may only come behind that.
        await asyncio.to_thread(self._memory.settle)
        running = asyncio.create_task(peer.run(mine, ticket))
        aborted = asyncio.create_task(events.get())
        try:
            await asyncio.wait({running, aborted}, return_when=asyncio.FIRST_COMPLETED)
            # Both may be over by now; an abort that was taken from the queue counts.
            if aborted.done():
                event = aborted.result()
                if isinstance(event, FinishedEvent):
                    return event
                raise ServiceError(ErrorReason.INTERNAL, f"unexpected {type(event).__name__} while prefilling")
            return running.result()
        finally:
            aborted.cancel()
            running.cancel()

    def _end_later(self, mine: DecodeRequest, peer: PrefillPeer) -> None:
        task = asyncio.create_task(self._end(mine, peer))
        self._endings.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._endings.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            structlog.get_logger().error("a request's memory was not given back", exc_info=error)

    async def _end(self, mine: DecodeRequest, peer: PrefillPeer) -> None:
        """Gives a request's memory back: at once unless prefill may still write it, else when it can't any more."""
        if mine.phase != "prefilling":
            await asyncio.wrap_future(self._engine.release(mine))
            return
        state = await peer.drain(mine)
        if state == "drained":
            await asyncio.wrap_future(self._engine.release(mine))
            return
        if state == "unknown":
            self._metrics.deadlines.labels("drain").inc()
        self._quarantine.enter(mine.generation)
        await asyncio.wrap_future(self._engine.quarantine(mine))
        log = structlog.get_logger()
        log.warning("pages quarantined", request_id=mine.request_id, peer=mine.peer, writer=state)
        incarnation = mine.peer.rpartition(" ")[2]
        peer.forget(incarnation)
        alarm = ""
        while not await self._landings.fence(incarnation, mine.session):
            if not alarm and (alarm := self.quarantine_alarm()):
                log.error("quarantine alarm", detail=alarm, request_id=mine.request_id)
            await asyncio.sleep(RETRY_S)
        await asyncio.wrap_future(self._engine.unquarantine(mine))
        seconds = self._quarantine.leave(mine.generation)
        self._metrics.quarantine_seconds.observe(seconds)
        log.warning("pages released from quarantine", request_id=mine.request_id, writer=state, seconds=seconds)

    def quarantine_alarm(self) -> str:
        """Why somebody should look at what is set aside, or ""."""
        return self._quarantine.alarm(self._engine.pools.use())

    def quarantine_oldest_s(self) -> float:
        return self._quarantine.oldest_s()

    def _peer(self, address: str) -> PrefillPeer:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ServiceError(
                ErrorReason.INVALID_REQUEST,
                f"prefill_address {address!r} is not host:port",
                field="prefill_address",
                theirs=address,
            )
        peer = self._peers.get(address)
        if peer is None:
            peer = PrefillPeer(
                address,
                self._settings,
                self._layout,
                self._incarnation,
                self._metrics,
                self._landings,
                self._memory,
                self._tls,
            )
            self._peers[address] = peer
        return peer

    def _tokens(
        self, mine: DecodeRequest, tokens: list[SampledToken], prompt_logprobs: list[common_pb2.TokenLogprobs]
    ) -> decode_pb2.Tokens:
        wants = mine.sampling.settings.logprobs is not None
        return decode_pb2.Tokens(
            token_ids=[token.token_id for token in tokens],
            logprobs=sampling_messages.tokens_to_messages(tokens) if wants else [],
            prompt_logprobs=prompt_logprobs,
        )

    def _finished(
        self, mine: DecodeRequest, finished: FinishedEvent, prefilled: Prefilled | None, queued_ns: int
    ) -> decode_pb2.GenerateEvent:
        self._metrics.finished.labels(finished.reason).inc()
        return _message(
            finished=decode_pb2.Finished(
                reason=_REASONS[finished.reason],
                stop_token_id=finished.stop_token_id,
                prompt_tokens=mine.prompt_tokens,
                completion_tokens=len(mine.sampling.generated),
                cached_tokens=mine.cached_tokens,
                queued_ns=queued_ns,
                prefill_ns=prefilled.timings.compute_ns if prefilled else 0,
                transfer_exposed_ns=prefilled.timings.exposed_transfer_ns if prefilled else 0,
                decode_ns=finished.decode_ns,
                seed=mine.sampling.settings.seed,
                prefill=prefilled.timings if prefilled else None,
            )
        )


def _message(
    *,
    reserved: decode_pb2.Reserved | None = None,
    tokens: decode_pb2.Tokens | None = None,
    finished: decode_pb2.Finished | None = None,
) -> decode_pb2.GenerateEvent:
    return decode_pb2.GenerateEvent(unix_ns=time.time_ns(), reserved=reserved, tokens=tokens, finished=finished)
