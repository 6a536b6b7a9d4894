"""The leader's side of a team: followers hold a reference to each job, and their reports go to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import structlog
from torch import Tensor

from common.errors import ServiceError
from common.model.model import PrefillChunk
from prefill_service.job import PagesSentEvent, PrefillJob
from prefill_service.scheduler import ScheduledChunk
from prefill_service.team import (
    AllSent,
    Bye,
    Drop,
    Failed,
    Gone,
    Open,
    Sent,
    Step,
    StepChunk,
    Stop,
    Team,
    TeamLostError,
)


class TeamLeader:
    """`open`, `step`, `drop_ended` and `logits` are for the engine's thread."""

    def __init__(self, team: Team, staged: bool, vocabulary: int, on_lost: Callable[[], None]) -> None:
        """`staged`: the last layers, and so the logits, are in another process."""
        self.team = team
        self._staged = staged
        self._vocabulary = vocabulary
        self._on_lost = on_lost
        self._closing = False
        self.lost = False
        self._lock = threading.Lock()
        self._jobs: dict[str, PrefillJob] = {}
        self._left: dict[str, int] = {}
        self._dropped: set[str] = set()
        self._threads = [
            threading.Thread(target=self._listen, args=(other,), name=f"reports-{other}", daemon=True)
            for other in range(1, team.size)
        ]
        for thread in self._threads:
            thread.start()

    def open(self, job: PrefillJob) -> None:
        """Before the job's first step."""
        job.join(self.team.size - 1)
        with self._lock:
            self._jobs[job.key] = job
            self._left[job.key] = self.team.size - 1
        self._tell(Open(job.key, tuple(job.token_ids.tolist()), job.ticket, job.transfer_timeout_s))

    def step(self, chunks: Sequence[ScheduledChunk], inputs: Sequence[PrefillChunk]) -> None:
        self._tell(
            Step(
                tuple(
                    StepChunk(chunk.job.key, chunk.plan.start, chunk.plan.end, given.logits)
                    for chunk, given in zip(chunks, inputs, strict=True)
                )
            )
        )

    def logits(self, inputs: Sequence[PrefillChunk], mine: list[Tensor | None]) -> list[Tensor | None]:
        """The step's logits, wherever they were computed."""
        if not self._staged:
            return mine
        shapes: list[tuple[int, ...] | None] = []
        for given in inputs:
            rows = given.token_ids.shape[0]
            by_mode = {"none": None, "last": (self._vocabulary,), "all": (rows, self._vocabulary)}
            shapes.append(by_mode[given.logits])
        return self.team.receive_logits(shapes)

    def drop_ended(self) -> None:
        """Tells the others of jobs that ended; at the end of one that went well there is nothing left to drop."""
        with self._lock:
            ended = [key for key, job in self._jobs.items() if job.phase == "ended" and key not in self._dropped]
            self._dropped.update(ended)
        for key in ended:
            self._tell(Drop(key))

    def close(self, timeout_s: float) -> None:
        """Ends the others; call when nothing is computed any more."""
        self._closing = True
        self._tell(Stop())
        for thread in self._threads:
            thread.join(timeout_s)
        self.team.leave()

    def _tell(self, command: Open | Step | Drop | Stop) -> None:
        try:
            self.team.command(command)
        except TeamLostError as error:
            self._lost(error)
            raise

    def _listen(self, other: int) -> None:
        while True:
            try:
                report = self.team.next_report(other)
            except TeamLostError as error:
                self._lost(error)
                return
            if isinstance(report, Bye):
                return
            self._obey(report)

    def _obey(self, report: Sent | AllSent | Failed | Gone) -> None:
        with self._lock:
            job = self._jobs.get(report.key)
        if job is None:
            return
        if isinstance(report, Sent):
            job.other_sent(
                PagesSentEvent(report.first_page, report.page_count, report.computed, report.receipt, report.ranges)
            )
        elif isinstance(report, AllSent):
            job.other_finished(report.ranges, report.rest_bytes)
        elif isinstance(report, Failed):
            job.fail(ServiceError(report.reason, report.message))
        else:
            self._gone(job, report)

    def _gone(self, job: PrefillJob, report: Gone) -> None:
        with self._lock:
            self._left[report.key] -= 1
            if not self._left[report.key]:
                del self._left[report.key], self._jobs[report.key]
                self._dropped.discard(report.key)
        job.other_gone(report.writes_failed)

    def _lost(self, error: TeamLostError) -> None:
        if not self._closing and not self.lost:
            self.lost = True
            structlog.get_logger().error("the team is lost, this service ends", detail=str(error))
            self._on_lost()
