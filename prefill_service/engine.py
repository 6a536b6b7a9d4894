"""The engine thread: schedule, run, post. It never waits for a transfer; pages leave while it computes on."""

from __future__ import annotations

import queue
import threading
import time

import structlog
import torch
from torch import Tensor

from common.errors import ErrorReason, ServiceError
from common.kernels.interface import KVKernels
from common.model.model import DeepSeekV4Model, PrefillChunk
from common.sampling import sample, with_logprobs
from common.transfer.send_ring import SendRing, Span
from common.transfer.sender import TransferSender
from prefill_service.job import PrefillJob, SpanUse
from prefill_service.metrics import PrefillMetrics
from prefill_service.packing import ChunkPlan, Outgoing, outgoing_pages, outgoing_rest
from prefill_service.scheduler import ScheduledChunk, Scheduler
from prefill_service.sequence_kv import SequenceKV
from prefill_service.team_leader import TeamLeader

RING_WAIT_S = 0.005
IDLE_WAIT_S = 0.2
MAX_REMEMBERED = 1 << 16


class PrefillEngine:
    """Owns model, scheduler and living jobs. `submit`, `cancel` and the readers are thread-safe."""

    def __init__(
        self,
        model: DeepSeekV4Model,
        kernels: KVKernels,
        scheduler: Scheduler,
        ring: SendRing,
        sender: TransferSender,
        metrics: PrefillMetrics,
        max_queued: int,
        team: TeamLeader | None = None,
    ) -> None:
        """`team`: other processes that compute and send with this one."""
        self._team = team
        self._model = model
        self._kernels = kernels
        self._scheduler = scheduler
        self._ring = ring
        self._sender = sender
        self._metrics = metrics
        self._max_queued = max_queued
        self._lock = threading.Lock()
        self._jobs: dict[str, PrefillJob] = {}
        # Keys that are over, oldest first, and whether a write of theirs failed. A message about one is late: a
        # request for it must never be computed, since its memory is somebody else's by now.
        self._over: dict[str, bool] = {}
        self._arrived: queue.SimpleQueue[PrefillJob | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="prefill-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Cancels every job and ends the thread."""
        self._stopping = True
        for job in self.jobs():
            self.cancel(job.key)
        self._arrived.put(None)
        self._thread.join(timeout_s)

    def jobs(self) -> list[PrefillJob]:
        with self._lock:
            return list(self._jobs.values())

    def find(self, key: str) -> PrefillJob | None:
        with self._lock:
            return self._jobs.get(key)

    def submit(self, job: PrefillJob) -> tuple[int, int]:
        """Queues a job; returns how many requests and tokens are ahead of it.

        Raises ServiceError: DUPLICATE_REQUEST for a living key, STALE_GENERATION for one that is over (its Cancel
        may have come first), QUEUE_FULL.
        """
        with self._lock:
            if job.key in self._over:
                self._metrics.late_messages.labels("request").inc()
                raise ServiceError(
                    ErrorReason.STALE_GENERATION, f"request {job.key} is over", field="key", theirs=job.key
                )
            if job.key in self._jobs:
                self._metrics.late_messages.labels("request").inc()
                raise ServiceError(
                    ErrorReason.DUPLICATE_REQUEST, f"request {job.key} is here already", field="key", theirs=job.key
                )
            queued = [other for other in self._jobs.values() if other.phase in ("queued", "computing")]
            if sum(other.phase == "queued" for other in queued) >= self._max_queued:
                raise ServiceError(
                    ErrorReason.QUEUE_FULL,
                    f"{self._max_queued} prompts wait already",
                    field="max_queued",
                    ours=self._max_queued,
                    retry_after_s=1.0,
                )
            self._jobs[job.key] = job
        self._arrived.put(job)
        return len(queued), sum(other.tokens - other.computed for other in queued)

    def cancel(self, key: str) -> PrefillJob | None:
        """Ends a job; `job.gone` of the returned job resolves when nothing of it can be written any more. None when
        there is no such job; then there never will be: the caller may use its memory again."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                self._metrics.late_messages.labels("cancel").inc()
                self._remember(key, self._over.get(key, False))
        if job is not None:
            job.cancel()
            self._sender.cancel(key)
            if job.gone.done():
                self._sender.forget(key)
            self._arrived.put(None)
        return job

    def gone(self, job: PrefillJob) -> None:
        """Called by a job when its last reference is back."""
        with self._lock:
            self._jobs.pop(job.key, None)
            self._remember(job.key, job.writes_failed)
        self._sender.forget(job.key)

    def writes_failed(self, key: str) -> bool:
        """Whether a write of a request that is over failed half-way."""
        with self._lock:
            return self._over.get(key, False)

    def _remember(self, key: str, writes_failed: bool) -> None:
        self._over[key] = writes_failed
        if len(self._over) > MAX_REMEMBERED:
            del self._over[next(iter(self._over))]

    def _loop(self) -> None:
        idle = True
        while not (self._stopping and self._scheduler.running == self._scheduler.waiting == 0):
            self._take_arrivals(IDLE_WAIT_S if idle else 0.0)
            for job in self._scheduler.drop_ended():
                # Also for a failed job: what it still has queued must not be written.
                self._sender.cancel(job.key)
                job.release()
            if self._team is not None:
                self._team.drop_ended()
            for job in self._scheduler.admit():
                job.kv = SequenceKV(self._model.config, self._kernels, self._model.device)
                for each in (job, *job.sharers):
                    each.start()
                if self._team is not None:
                    self._team.open(job)
            chunks = self._staged(self._scheduler.next_chunks())
            idle = not chunks and self._scheduler.running == 0
            if chunks:
                self._step(chunks)
            elif not idle:
                time.sleep(RING_WAIT_S)

    def _take_arrivals(self, wait_s: float) -> None:
        try:
            job = self._arrived.get(timeout=wait_s) if wait_s else self._arrived.get_nowait()
            while True:
                if job is not None:
                    self._schedule(job)
                job = self._arrived.get_nowait()
        except queue.Empty:
            return

    def _schedule(self, job: PrefillJob) -> None:
        """Behind the others, or beside one with the same prompt, as n choices of one request have it."""
        # Processes of a team send their own parts, for the job they were told of.
        leader = self._scheduler.join(job) if self._team is None else None
        if leader is None:
            self._scheduler.add(job)
            return
        self._metrics.shared.inc()
        if leader.phase == "computing":
            job.start()

    def _staged(self, chunks: list[ScheduledChunk]) -> list[tuple[ScheduledChunk, Span]]:
        """The chunks for which the send ring has room now, oldest first; the others wait for transfers to end."""
        staged: list[tuple[ScheduledChunk, Span]] = []
        for chunk in chunks:
            span = self._ring.take(chunk.plan.span_bytes)
            if span is None:
                self._metrics.ring_waits.inc()
                break
            staged.append((chunk, span))
        return staged

    def _step(self, staged: list[tuple[ScheduledChunk, Span]]) -> None:
        begun = time.monotonic()
        inputs: list[PrefillChunk] = []
        for chunk, span in staged:
            kv = _kv(chunk.job)
            kv.stage(chunk.plan.staging(span))
            inputs.append(_input(chunk.job, kv, chunk.plan))
        uses = [SpanUse(self._ring, span) for _, span in staged]
        try:
            outputs = self._prefill([chunk for chunk, _ in staged], inputs)
            if self._model.device.type != "cpu":
                # The pages of this step lie in host memory; they may be sent only once the device has written them.
                torch.cuda.current_stream(self._model.device).synchronize()
            outputs = [None if logits is None else logits.cpu() for logits in outputs]
        except Exception as cause:  # noqa: BLE001 - one bad step must not end the service
            structlog.get_logger().exception("prefill step failed", requests=[c.job.request_id for c, _ in staged])
            for (chunk, _), use in zip(staged, uses, strict=True):
                for job in (chunk.job, *chunk.job.sharers):
                    self._give_up(job, ServiceError(ErrorReason.PREFILL_FAILED, f"prefill step failed: {cause!r}"))
                use.release()
            return
        self._metrics.step(time.monotonic() - begun, sum(c.plan.end - c.plan.start for c, _ in staged))
        # Whoever came meanwhile with a prompt of this step can still have its pages.
        self._take_arrivals(0.0)
        for (chunk, _), use, logits in zip(staged, uses, outputs, strict=True):
            try:
                self._after(chunk, use, logits)
            finally:
                use.release()

    def _prefill(self, chunks: list[ScheduledChunk], inputs: list[PrefillChunk]) -> list[Tensor | None]:
        if self._team is None:
            return self._model.prefill(inputs)
        self._team.step(chunks, inputs)
        return self._team.logits(inputs, self._model.prefill(inputs, self._team.team))

    def _after(self, chunk: ScheduledChunk, use: SpanUse, logits: Tensor | None) -> None:
        """Posts what the chunk completed, to everybody whose prompt it is."""
        leader, plan = chunk.job, chunk.plan
        jobs = [leader, *leader.sharers]
        if all(job.phase == "ended" for job in jobs):
            return
        done = [job for job in jobs if self._hand_over(job, plan, use, logits, _kv(leader))]
        if not plan.is_last:
            return
        leader.kv = None
        self._scheduler.remove(leader)
        for job in jobs:
            if job not in done:
                self._sender.cancel(job.key)
            job.release()

    def _hand_over(self, job: PrefillJob, plan: ChunkPlan, use: SpanUse, logits: Tensor | None, kv: SequenceKV) -> bool:
        """Whether the job goes on, or is done; an error costs this job only."""
        job.computed = plan.end
        if job.phase == "ended":
            return False
        try:
            self._send_chunk(job, plan, use, logits, kv)
        except ServiceError as error:
            self._give_up(job, error)
            return False
        except Exception as cause:  # noqa: BLE001 - likewise
            structlog.get_logger().exception("posting a chunk failed", request_id=job.request_id)
            self._give_up(job, ServiceError(ErrorReason.PREFILL_FAILED, f"posting failed: {cause!r}"))
            return False
        return True

    def _send_chunk(
        self, job: PrefillJob, plan: ChunkPlan, use: SpanUse, logits: Tensor | None, kv: SequenceKV
    ) -> None:
        """Complete pages; behind the last chunk also the rest and the first token."""
        job.chunk_done()
        there, count = plan.lacking(job.ticket)
        if count:
            pages = outgoing_pages(plan, use.span, job.ticket, there, count)
            self._post(job, use, pages, (plan.first_page + there, count))
        if logits is not None and job.wants_prompt_logprobs:
            self._add_prompt_logprobs(job, plan, logits)
        if plan.is_last:
            if logits is None:
                raise ValueError("the last chunk gave no logits")
            first = sample(logits.view(-1, logits.shape[-1])[-1:], [job.sampling])[0]
            self._post(job, use, outgoing_rest(plan, use.span, job.ticket, kv), None)
            job.computed_last(first)

    def _post(self, job: PrefillJob, use: SpanUse, outgoing: Outgoing, pages: tuple[int, int] | None) -> None:
        post = self._sender.post(job.key, job.ticket.session, outgoing.runs, job.transfer_timeout_s)
        job.add_post(post, use, outgoing.ranges, pages, job.computed)

    def _add_prompt_logprobs(self, job: PrefillJob, plan: ChunkPlan, logits: Tensor) -> None:
        """Row t of the chunk's logits is the distribution of the token at position start + t + 1."""
        wanted = job.sampling.settings.prompt_logprobs or 0
        following: list[int] = job.token_ids[plan.start + 1 : plan.end + 1].tolist()
        rows = logits[: len(following)]
        for token, row in zip(following, rows, strict=True):
            job.prompt_logprobs.append(with_logprobs(row, token, wanted))

    def _give_up(self, job: PrefillJob, error: ServiceError) -> None:
        if job.fail(error):
            self._metrics.failures.labels(error.reason.name.lower()).inc()


def _kv(job: PrefillJob) -> SequenceKV:
    if job.kv is None:
        raise ValueError(f"job {job.key} has no KV")
    return job.kv


def _input(job: PrefillJob, kv: SequenceKV, plan: ChunkPlan) -> PrefillChunk:
    tokens: torch.Tensor = job.token_ids[plan.start : plan.end]
    if job.wants_prompt_logprobs:
        return PrefillChunk(tokens, kv, logits="all")
    return PrefillChunk(tokens, kv, logits="last" if plan.is_last else "none")
