"""Talks to prefill services: handshake once an incarnation, one stream a request, cancel and drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import grpc
import grpc.aio
import structlog

from common.errors import ErrorReason, ServiceError
from common.rpc import layout_messages, sampling_messages, ticket_messages
from common.rpc.channels import open_channel
from common.rpc.errors import from_rpc_error
from common.rpc.gen.dsv4pd.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from common.rpc.request_scope import outgoing_metadata
from common.rpc.tls import Tls
from common.sampling import SampledToken
from common.transfer.landed_memory import LandedMemory
from common.transfer.layout import HandoverLayout
from common.transfer.ticket import RegionKind, TransferTicket
from decode_service.landings import Landings
from decode_service.metrics import DecodeMetrics
from decode_service.request import DecodeRequest
from decode_service.settings import DecodeSettings
from decode_service.verification import HandoverCheck, LandedRange

WriterState = Literal["drained", "failed", "gone", "unknown"]
PROBE_TIMEOUT_S = 1.0
GRACE_S = 2.0


@dataclass(frozen=True)
class Prefilled:
    """What a finished handover brings besides pages."""

    first_token: SampledToken
    prompt_logprobs: tuple[SampledToken, ...]
    timings: prefill_pb2.PrefillTimings
    handover_ns: int


class PrefillPeer:
    """One prefill address. Restarts of the service behind it are noticed by its incarnation."""

    def __init__(
        self,
        address: str,
        settings: DecodeSettings,
        layout: HandoverLayout,
        incarnation: common_pb2.Incarnation,
        metrics: DecodeMetrics,
        landings: Landings,
        memory: LandedMemory | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.address = address
        self._settings = settings
        self._layout = layout
        self._incarnation = incarnation
        self._metrics = metrics
        self._memory = memory or LandedMemory()
        self._landings = landings
        self._channel = open_channel(address, tls)
        self._stub = prefill_pb2_grpc.PrefillStub(self._channel)
        self._handshake: asyncio.Task[str] | None = None
        self._known: str = ""
        self._last: str = ""
        self._retiring: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        if self._handshake is not None:
            self._handshake.cancel()
        await self._channel.close()

    async def hello(self) -> str:
        """The peer's incarnation, after its layout was found equal to ours. Raises ServiceError.

        Requests that come while a handshake runs share it: a mute peer costs them one time-out, not one each.
        """
        if self._known:
            return self._known
        if self._handshake is None or self._handshake.done():
            self._handshake = asyncio.create_task(self._shake_hands())
            # Everybody who waited may have left by the time it fails.
            self._handshake.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._handshake)

    async def _shake_hands(self) -> str:
        request = prefill_pb2.HelloRequest(caller=self._incarnation, layout=layout_messages.to_message(self._layout))
        try:
            reply = await self._say_hello(request)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, begun=False) from None
        theirs = layout_messages.from_message(reply.layout)
        layout_messages.check_same(self._layout, theirs, f"prefill {self.address}")
        self._known = reply.callee.id
        if self._last not in ("", self._known):
            # The process before it is over: nothing that it sent may land any more.
            task = asyncio.create_task(self._landings.retire(self._last))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        self._last = self._known
        structlog.get_logger().info("prefill joined", address=self.address, incarnation=self._known)
        return self._known

    async def _say_hello(self, request: prefill_pb2.HelloRequest) -> prefill_pb2.HelloReply:
        """Raises AioRpcError: at once when nobody listens there."""
        timeout = self._settings.handshake_timeout_s
        try:
            return await self._stub.Hello(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or not await self._accepts_connections():
                raise
        # The channel repeats its last failure until its back-off is over, but a restarted service listens by now.
        return await self._stub.Hello(request, timeout=timeout, wait_for_ready=True)

    async def run(self, request: DecodeRequest, ticket: TransferTicket) -> Prefilled:
        """One prompt: returns when all of it has landed and is verified. Raises ServiceError. The ticket's session
        is filled in here: each incarnation writes to one of its own.

        After an error writes may still be in flight: call `drain` before the memory is used again.
        """
        known = bool(self._known)
        try:
            return await self._run(request, ticket)
        except ServiceError as error:
            unanswered = error.reason is ErrorReason.PREFILL_UNAVAILABLE and known and not request.prefill_answered
            if error.reason is not ErrorReason.STALE_GENERATION and not unanswered:
                raise
            # The service was restarted since the handshake, before it took the request: once more.
            self._known = ""
            before, session = request.peer.rpartition(" ")[2], request.session
            if await self.hello() != before and not await self._landings.fence(before, session):
                raise
            try:
                return await self._run(request, ticket)
            except ServiceError as again:
                # The same process, and it did take the request before the connection broke.
                raise error if again.reason is ErrorReason.STALE_GENERATION else again from None

    async def _run(self, request: DecodeRequest, ticket: TransferTicket) -> Prefilled:
        incarnation = await self.hello()
        request.session = await self._landings.open(incarnation)
        ticket = replace(ticket, session=request.session)
        request.peer = f"{self.address} {incarnation}"
        begun = time.time_ns()
        check = HandoverCheck(ticket, request.prompt_tokens, self._layout.ratios, self.address, self._memory)
        # The service keeps these deadlines itself; this one ends the wait for a service that doesn't.
        limit = self._settings.prefill_queue_timeout_s + self._settings.prefill_timeout_s + GRACE_S
        stream = self._stub.Prefill(
            self._message(request, ticket, incarnation), timeout=limit, metadata=outgoing_metadata()
        )
        try:
            async for event in stream:
                if event.key.generation != request.generation or event.key.request_id != request.request_id:
                    self._metrics.late_events.inc()
                    continue
                request.prefill_answered = True
                kind = event.WhichOneof("event")
                if kind == "pages_sent":
                    self._metrics.handover_bytes.inc(event.pages_sent.bytes)
                    await self._verify(check, event.pages_sent.digests)
                elif kind == "done":
                    await self._verify(check, event.done.digests)
                    check.check_complete()
                    self._metrics.late_events.inc(check.repeated)
                    return Prefilled(
                        first_token=_first_token(event.done, request),
                        prompt_logprobs=tuple(
                            sampling_messages.token_from_message(token) for token in event.done.prompt_logprobs
                        ),
                        timings=event.done.timings,
                        handover_ns=time.time_ns() - begun,
                    )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                self._known = ""
            raise self._error(error, begun=request.prefill_answered) from None
        finally:
            stream.cancel()
        raise ServiceError(ErrorReason.PREFILL_FAILED, f"prefill {self.address} ended its stream without a result")

    async def drain(self, request: DecodeRequest) -> WriterState:
        """After this says "drained" nothing of the request can be written any more. Otherwise only fencing its
        session makes sure of that: "failed", a write failed half-way and its bytes may still be on the network;
        "gone", its writer's process does not exist any more; "unknown", it can't be reached."""
        incarnation = request.peer.rpartition(" ")[2]
        if not incarnation:
            return "drained"
        message = prefill_pb2.CancelRequest(
            key=common_pb2.RequestKey(request_id=request.request_id, generation=request.generation),
            drain_timeout_s=self._settings.cancel_timeout_s,
        )
        try:
            reply = await self._stub.Cancel(message, timeout=self._settings.cancel_timeout_s + 1)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                return "unknown"
            return "gone" if await self._accepts_connections() is False else "unknown"
        if reply.callee.id != incarnation:
            return "gone"
        return "failed" if reply.state == prefill_pb2.CancelReply.STATE_DRAINED_AFTER_FAILURE else "drained"

    def forget(self, incarnation: str) -> None:
        """The next request shakes hands again, if that is the incarnation known."""
        if self._known == incarnation:
            self._known = ""

    async def _accepts_connections(self) -> bool | None:
        """True when somebody listens at the peer's address, False when its host answers that nobody does: the
        process is over. None when there is no answer."""
        host, _, port = self.address.rpartition(":")
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), PROBE_TIMEOUT_S)
        except ConnectionRefusedError:
            return False
        except (OSError, TimeoutError):
            return None
        writer.close()
        return True

    async def _verify(self, check: HandoverCheck, digests: Iterable[prefill_pb2.RangeDigest]) -> None:
        ranges = [self._landed(digest) for digest in digests]
        begun = time.monotonic()
        await asyncio.to_thread(check.add, ranges)
        self._metrics.digest_seconds.inc(time.monotonic() - begun)

    def _landed(self, digest: prefill_pb2.RangeDigest) -> LandedRange:
        """Raises ServiceError for a component that this build does not know: leaving it out would be silent."""
        try:
            kind = RegionKind(digest.kind)
        except ValueError:
            raise ServiceError(
                ErrorReason.TRANSFER_FAILED,
                f"prefill {self.address} sent a component of unknown kind {digest.kind} of layer {digest.layer_id}",
                field="kind",
                ours=", ".join(f"{known.value} {known.name}" for known in RegionKind),
                theirs=digest.kind,
            ) from None
        return LandedRange(digest.layer_id, kind, digest.first, digest.count, digest.digest)

    def _message(self, request: DecodeRequest, ticket: TransferTicket, incarnation: str) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            key=common_pb2.RequestKey(request_id=request.request_id, generation=request.generation),
            expected_incarnation=incarnation,
            token_ids=request.token_ids,
            sampling=sampling_messages.to_message(request.sampling.settings),
            ticket=ticket_messages.to_message(ticket, self._incarnation),
            queue_timeout_s=self._settings.prefill_queue_timeout_s,
            prefill_timeout_s=self._settings.prefill_timeout_s,
            transfer_timeout_s=self._settings.transfer_timeout_s,
        )

    def _error(self, error: grpc.aio.AioRpcError, *, begun: bool) -> ServiceError:
        """`begun`: the service had taken the request."""
        made = from_rpc_error(error, ErrorReason.PREFILL_UNAVAILABLE)
        if made.reason is ErrorReason.INTERNAL:
            # Its fault, not ours: routers count it against the right worker.
            return ServiceError(ErrorReason.PREFILL_FAILED, f"prefill {self.address}: {made.message}")
        if made.reason is ErrorReason.DEADLINE_EXCEEDED:
            # Prefill says which of its deadlines passed; a bare status is that of the call itself.
            self._metrics.deadlines.labels(made.field.removesuffix("_timeout_s") or "call").inc()
        if made.reason is not ErrorReason.PREFILL_UNAVAILABLE:
            return made
        return ServiceError(
            ErrorReason.PREFILL_UNAVAILABLE,
            f"prefill {self.address} is not reachable: {error.details()}",
            field="prefill_address",
            theirs=self.address,
            retry_after_s=1.0,
            not_begun=not begun,
        )


def _first_token(done: prefill_pb2.Done, request: DecodeRequest) -> SampledToken:
    if request.sampling.settings.logprobs is None:
        return SampledToken(done.first_token, 0.0)
    return sampling_messages.token_from_message(done.logprobs)
