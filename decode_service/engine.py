"""The engine thread of the decode service: take commands, admit, step. Everything that changes pools, tables or
the batch happens on it; asyncio talks to it through one queue and hears from it through the requests' `emit`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import structlog
import torch

from common.errors import ErrorReason, ServiceError
from common.kernels.interface import KVKernels
from common.kv.layout import C4_PAGE, host_token_len, logical_page_count
from common.model.model import DeepSeekV4Model
from common.sampling import SampledToken, sample
from decode_service.decode_runner import open_runner
from decode_service.device_pools import DevicePools
from decode_service.hisparse import HiSparseCoordinator
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.metrics import DecodeMetrics
from decode_service.request import DecodeRequest, FailedEvent, FinishedEvent, ReservedEvent
from decode_service.resources import RequestResources, ResourcePools
from decode_service.staging import StagingPool
from decode_service.waiting import WaitingQueue

IDLE_WAIT_S = 0.2
MAX_COMMANDS = 1 << 16
T = TypeVar("T")


class DecodeEngine:
    """`submit`, `admit`, `release`, `quarantine`, `abort` and the readers are thread-safe."""

    def __init__(
        self,
        model: DeepSeekV4Model,
        kernels: KVKernels,
        device: DevicePools,
        hisparse: HiSparseCoordinator,
        pools: ResourcePools,
        metrics: DecodeMetrics,
        max_batch: int,
        max_queued: int,
        max_context_tokens: int,
        staged: tuple[StagingPool, DeepSeekV4PagedHostPool] | None = None,
        max_overtakes: int = 0,
    ) -> None:
        """`staged`: where prompts land before they are copied to the host pool; None with direct admission.
        `max_overtakes`: see WaitingQueue."""
        self.pools = pools
        self.hisparse = hisparse
        most_pages = logical_page_count(max_context_tokens)
        self._runner = open_runner(model, kernels, device, hisparse, most_pages)
        self._metrics = metrics
        self._max_batch = max_batch
        self._max_queued = max_queued
        self._max_context_tokens = max_context_tokens
        self._staged = staged
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue(MAX_COMMANDS)
        self._lock = threading.Lock()
        self._requests: dict[int, DecodeRequest] = {}
        self._waiting: WaitingQueue[DecodeRequest] = WaitingQueue(max_overtakes)
        self._running: list[DecodeRequest] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="decode-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopping = True
        self._commands.put(lambda: None)
        self._thread.join(timeout_s)

    def requests(self) -> list[DecodeRequest]:
        with self._lock:
            return list(self._requests.values())

    def submit(self, request: DecodeRequest) -> None:
        """Queues a request for memory; a ReservedEvent follows.

        Raises ServiceError: DUPLICATE_REQUEST, CONTEXT_TOO_LONG, POOL_EXHAUSTED (could never fit), QUEUE_FULL.
        """
        total = request.total_tokens
        if total > self._max_context_tokens:
            raise ServiceError(
                ErrorReason.CONTEXT_TOO_LONG,
                f"prompt of {request.prompt_tokens} tokens + max_tokens "
                f"{request.sampling.settings.max_tokens} = {total} is more than the context of "
                f"{self._max_context_tokens}",
                field="max_tokens" if request.prompt_tokens < self._max_context_tokens else "prompt",
                ours=self._max_context_tokens,
                theirs=total,
            )
        if not self.pools.fits_ever(total, request.prompt_tokens):
            sizes = ", ".join(f"{use.name} {use.total}" for use in self.pools.use())
            raise ServiceError(
                ErrorReason.POOL_EXHAUSTED,
                f"a request of {total} tokens does not fit empty pools (pages: {sizes})",
                field="max_tokens",
                theirs=total,
            )
        with self._lock:
            if any(r.request_id == request.request_id and not r.answered for r in self._requests.values()):
                raise ServiceError(
                    ErrorReason.DUPLICATE_REQUEST,
                    f"request {request.request_id} is here already",
                    field="request_id",
                    theirs=request.request_id,
                )
            if sum(other.phase == "queued" for other in self._requests.values()) >= self._max_queued:
                raise ServiceError(
                    ErrorReason.QUEUE_FULL,
                    f"{self._max_queued} requests wait for memory already",
                    field="max_queued",
                    ours=self._max_queued,
                    retry_after_s=1.0,
                )
            self._requests[request.generation] = request
        if self.pools.prefix is not None:
            request.chain = self.pools.prefix.chain(request.token_ids)
        self._command(lambda: self._waiting.append(request))

    def admit(self, request: DecodeRequest, first_token: SampledToken) -> None:
        """The handover is complete and verified: the request joins the next step."""
        self._command(lambda: self._admit(request, first_token))

    def release(self, request: DecodeRequest) -> Future[None]:
        """Nobody writes the request's memory any more: gives all of it back, in whatever phase it is; once."""
        return self.call(lambda: self._end(request))

    def quarantine(self, request: DecodeRequest) -> Future[None]:
        """The request is over but its writer may be alive: its memory is set aside until `unquarantine`."""
        return self.call(lambda: self._quarantine(request))

    def unquarantine(self, request: DecodeRequest) -> Future[None]:
        """The writer is provably gone."""
        return self.call(lambda: self._unquarantine(request))

    def abort(self, request: DecodeRequest) -> None:
        """Ends a request with finish reason abort; the caller's stream then gives its memory back."""
        self._command(lambda: self._abort(request))

    def check_integrity(self) -> Future[None]:
        """Fails with ValueError when pools, tables or requests disagree."""
        return self.call(self._check_integrity)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function on the engine's thread."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

        self._command(run)
        return future

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command, timeout=5.0)

    def _loop(self) -> None:
        while not self._stopping:
            self.turn(0.0 if self._running else IDLE_WAIT_S)

    def turn(self, wait_s: float = 0.0) -> None:
        """What the engine's thread does over and over (tests call it in its place): obeys commands, waiting at most
        `wait_s` for the first, gives out memory, decodes one step."""
        self._take_commands(wait_s)
        self._reserve_waiting()
        if self._running:
            self._step(self._running[: self._max_batch])

    def _take_commands(self, wait_s: float) -> None:
        try:
            command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            while True:
                self._obey(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _obey(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:  # noqa: BLE001 - the thread serves everybody; it must go on
            structlog.get_logger().exception("a command failed")

    def _reserve_waiting(self) -> None:
        """First come, first served, with bounded overtaking: see WaitingQueue."""
        if len(self._waiting):
            self._metrics.overtakes.inc(self._waiting.serve(self._reserve))

    def _reserve(self, request: DecodeRequest) -> bool:
        resources = self.pools.reserve(request.total_tokens, request.prompt_tokens, request.chain)
        if resources is None:
            return False
        request.resources = resources
        request.phase = "prefilling"
        request.emit(ReservedEvent(resources, time.time_ns() - request.arrived_ns))
        return True

    def _admit(self, request: DecodeRequest, first_token: SampledToken) -> None:
        if request.phase != "prefilling" or request.resources is None or request.aborted:
            self._metrics.late_events.inc()
            return
        request.phase = "running"
        request.admitted_ns = time.time_ns()
        finished = request.accept(first_token)
        if finished is not None:
            self._finish(request, finished)
            return
        try:
            self._bring_in(request, request.resources)
        except Exception as cause:  # noqa: BLE001 - it costs this request only
            structlog.get_logger().exception("admission failed", request_id=request.request_id)
            self._fail(request, ServiceError(ErrorReason.INTERNAL, f"admission failed: {cause!r}"))
            return
        self._running.append(request)

    def _bring_in(self, request: DecodeRequest, resources: RequestResources) -> None:
        """Direct: the prompt is on the host already. Staged: it is copied there first."""
        if self._staged is not None:
            staging, host = self._staged
            entries = host_token_len(request.prompt_tokens)
            shared = len(resources.prefix)
            own = resources.host_pages[shared:]
            staging.copy_to_host(host, resources.staging_pages, own, entries - shared * C4_PAGE.rows)
            resources = request.resources = self.pools.release_staging(resources)
        self.hisparse.admit_request_direct(resources, request.prompt_tokens)

    def _step(self, batch: list[DecodeRequest]) -> None:
        begun = time.monotonic()
        try:
            resources, positions = [_resources(r) for r in batch], [r.position for r in batch]
            self.hisparse.prepare_step(resources, positions)
            logits = self._runner.step(resources, positions, [r.sampling.generated[-1] for r in batch])
            bad = torch.isnan(logits).any(dim=1).tolist()
            good = [row for row in range(len(batch)) if not bad[row]]
            sampled = sample(logits[good], [batch[row].sampling for row in good])
        except Exception as cause:  # noqa: BLE001 - one bad step must not end the service
            structlog.get_logger().exception("decode step failed", requests=[r.request_id for r in batch])
            for request in batch:
                self._fail(request, ServiceError(ErrorReason.INTERNAL, f"decode step failed: {cause!r}"))
            return
        for row, token in zip(good, sampled, strict=True):
            finished = batch[row].accept(token)
            if finished is not None:
                self._finish(batch[row], finished)
        for row in range(len(batch)):
            if bad[row]:
                self._fail(batch[row], ServiceError(ErrorReason.INTERNAL, "the model gave NaN logits"))
        self._metrics.step(time.monotonic() - begun, len(batch))
        if len(self._running) > self._max_batch:
            # More are admitted than fit a step: take turns. Those who waited go first, whoever has just ended.
            stepped = {request.generation for request in batch}
            self._running.sort(key=lambda request: request.generation in stepped)

    def _finish(self, request: DecodeRequest, finished: FinishedEvent) -> None:
        self._leave_batch(request)
        self._end(request)
        request.emit(finished)

    def _fail(self, request: DecodeRequest, error: ServiceError) -> None:
        self._leave_batch(request)
        self._end(request, sound=False)
        request.emit(FailedEvent(error))

    def _abort(self, request: DecodeRequest) -> None:
        finished = FinishedEvent("abort", None, 0)
        if request.phase == "running":
            self._finish(request, finished)
        elif request.phase in ("queued", "prefilling") and not request.aborted:
            request.aborted = True
            request.emit(finished)

    def _leave_batch(self, request: DecodeRequest) -> None:
        if request in self._running:
            self._running.remove(request)

    def _end(self, request: DecodeRequest, *, sound: bool = True) -> None:
        """Every end of life comes here; only the first counts. `sound`: what its pages hold is right."""
        if request.phase == "ended":
            return
        self._leave_batch(request)
        self._waiting.remove(request)
        if request.resources is not None:
            self.hisparse.release(request.resources.hot_slot)
            self.pools.release(request.resources, self._names_to_keep(request) if sound else b"")
        self._forget(request)

    def _names_to_keep(self, request: DecodeRequest) -> bytes:
        """Of the pages that may serve others: some of an admitted request, whose handover is verified."""
        if self.pools.prefix is None or request.phase != "running" or _resources(request).staging_pages:
            return b""
        return self.pools.prefix.names_to_keep(request.chain, request.token_ids, request.sampling.generated)

    def _quarantine(self, request: DecodeRequest) -> None:
        if request.phase != "prefilling" or request.resources is None:
            self._end(request)
            return
        self.pools.quarantine(request.resources)
        request.phase = "draining"
        self._metrics.quarantined.inc()

    def _unquarantine(self, request: DecodeRequest) -> None:
        if request.phase != "draining" or request.resources is None:
            return
        self.pools.release_quarantined(request.resources)
        self._forget(request)

    def _forget(self, request: DecodeRequest) -> None:
        request.phase = "ended"
        with self._lock:
            self._requests.pop(request.generation, None)

    def _check_integrity(self) -> None:
        requests = self.requests()
        by_phase = {
            phase: [r for r in requests if r.phase == phase]
            for phase in ("queued", "prefilling", "running", "draining")
        }
        held = [_resources(r) for phase in ("prefilling", "running") for r in by_phase[phase]]
        self.pools.check_integrity(held, [_resources(r) for r in by_phase["draining"]])
        for phase, kept in (("queued", self._waiting), ("running", self._running)):
            mine, listed = sorted(r.generation for r in by_phase[phase]), sorted(r.generation for r in kept)
            # A request just submitted is known before its command puts it into the queue.
            if listed != mine and not (phase == "queued" and set(listed) < set(mine)):
                raise ValueError(f"{len(mine)} requests are {phase}, {len(listed)} are listed as such")
        self.hisparse.check_integrity(
            [_resources(r).hot_slot for r in by_phase["running"]],
            [(r.position + 1) // 4 for r in by_phase["running"]],
        )


def _resources(request: DecodeRequest) -> RequestResources:
    if request.resources is None:
        raise ValueError(f"request {request.request_id} has no memory")
    return request.resources
