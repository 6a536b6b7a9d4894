"""A prefill process that does what the leader of its team says: compute, pack, send its share, report."""

from __future__ import annotations

import queue
import threading

import torch

from common.errors import ErrorReason, ServiceError
from common.kernels.interface import KVKernels
from common.model.model import DeepSeekV4Model, PrefillChunk
from common.sampling import SampledToken, SamplingSettings, SamplingState
from common.transfer.alignment import Place
from common.transfer.send_ring import SendRing, Span
from common.transfer.sender import TransferSender
from prefill_service.job import DoneEvent, Event, FailedEvent, PagesSentEvent, PrefillJob, SpanUse
from prefill_service.packing import ChunkPlan, Outgoing, outgoing_pages, outgoing_rest
from prefill_service.sequence_kv import SequenceKV
from prefill_service.team import AllSent, Bye, Drop, Failed, Gone, Open, Report, Sent, Step, Team

RING_TIMEOUT_S = 120.0
MAX_REPORTS = 1 << 16


class Follower:
    """Runs on the thread that calls `run`; a second one sends the reports."""

    def __init__(
        self,
        team: Team,
        place: Place,
        model: DeepSeekV4Model,
        kernels: KVKernels,
        ring: SendRing,
        sender: TransferSender,
    ) -> None:
        self._team = team
        self._place = place
        self._model = model
        self._kernels = kernels
        self._ring = ring
        self._sender = sender
        self._jobs: dict[str, PrefillJob] = {}
        self._computing: set[str] = set()
        self._reports: queue.Queue[Report] = queue.Queue(MAX_REPORTS)

    def run(self) -> None:
        """Until the leader says that the service ends. Raises TeamLostError."""
        reports = threading.Thread(target=self._send_reports, name="reports", daemon=True)
        reports.start()
        while True:
            command = self._team.next_command()
            if isinstance(command, Open):
                self._open(command)
            elif isinstance(command, Step):
                self._step(command)
            elif isinstance(command, Drop):
                self._drop(command.key)
            else:
                self._reports.put(Bye())
                reports.join()
                self._team.leave()
                return

    def _open(self, command: Open) -> None:
        key = command.key
        job = PrefillJob(
            key=key,
            request_id=key,
            token_ids=list(command.token_ids),
            sampling=SamplingState(SamplingSettings(), list(command.token_ids), ()),
            ticket=command.ticket,
            transfer_timeout_s=command.transfer_timeout_s,
            emit=lambda event: self._emit(key, event),
            on_gone=self._gone,
        )
        job.kv = SequenceKV(self._model.config, self._kernels, self._model.device)
        job.start()
        self._jobs[key] = job
        self._computing.add(key)

    def _drop(self, key: str) -> None:
        job = self._jobs.pop(key, None)
        if job is None:
            return
        job.cancel()
        self._sender.cancel(key)
        if job.gone.done():
            self._sender.forget(key)
        self._computed(job)

    def _step(self, command: Step) -> None:
        plans: list[tuple[PrefillJob, ChunkPlan, Span]] = []
        inputs: list[PrefillChunk] = []
        for chunk in command.chunks:
            job = self._jobs[chunk.key]
            plan = ChunkPlan(self._model.config.compress_ratios, job.tokens, chunk.start, chunk.end, self._place)
            span = self._ring.take(plan.span_bytes, RING_TIMEOUT_S)
            if span is None:
                raise RuntimeError(f"no room in the send ring within {RING_TIMEOUT_S:g} s")
            kv = _kv(job)
            kv.stage(plan.staging(span))
            inputs.append(PrefillChunk(job.token_ids[plan.start : plan.end], kv, chunk.logits))
            plans.append((job, plan, span))
        self._team.send_logits(self._model.prefill(inputs, self._team))
        if self._model.device.type != "cpu":
            torch.cuda.current_stream(self._model.device).synchronize()
        for job, plan, span in plans:
            use = SpanUse(self._ring, span)
            try:
                self._after(job, plan, use)
            except ServiceError as error:
                job.fail(error)
            finally:
                use.release()

    def _after(self, job: PrefillJob, plan: ChunkPlan, use: SpanUse) -> None:
        job.computed = plan.end
        job.chunk_done()
        if job.phase != "ended":
            there, count = plan.lacking(job.ticket)
            if count:
                pages = outgoing_pages(plan, use.span, job.ticket, there, count)
                self._post(job, use, pages, (plan.first_page + there, count))
            if plan.is_last:
                self._post(job, use, outgoing_rest(plan, use.span, job.ticket, _kv(job)), None)
                job.computed_last(SampledToken(0, 0.0))
        if plan.is_last:
            self._computed(job)

    def _post(self, job: PrefillJob, use: SpanUse, outgoing: Outgoing, pages: tuple[int, int] | None) -> None:
        post = self._sender.post(job.key, job.ticket.session, outgoing.runs, job.transfer_timeout_s)
        job.add_post(post, use, outgoing.ranges, pages, job.computed)

    def _computed(self, job: PrefillJob) -> None:
        """Gives the computing thread's reference back, once."""
        if job.key in self._computing:
            self._computing.remove(job.key)
            job.kv = None
            job.release()

    def _emit(self, key: str, event: Event) -> None:
        if isinstance(event, PagesSentEvent):
            self._reports.put(
                Sent(key, event.first_page, event.page_count, event.tokens_computed, event.receipt, event.ranges)
            )
        elif isinstance(event, DoneEvent):
            self._reports.put(AllSent(key, event.ranges, event.rest_bytes))
        elif isinstance(event, FailedEvent) and event.error.reason is not ErrorReason.CANCELLED:
            self._reports.put(Failed(key, event.error.reason, event.error.message))

    def _gone(self, job: PrefillJob) -> None:
        self._sender.forget(job.key)
        self._reports.put(Gone(job.key, job.writes_failed))

    def _send_reports(self) -> None:
        report: Report | None = None
        while not isinstance(report, Bye):
            report = self._reports.get()
            self._team.report(report)


def _kv(job: PrefillJob) -> SequenceKV:
    if job.kv is None:
        raise ValueError(f"job {job.key} has no KV")
    return job.kv
