"""Which chunks are computed next: first come, first served, several short prompts in one step.

A prompt's chunks begin at multiples of the chunk size whatever else is there, and at most one chunk of a prompt
is in a step. Prompts enter in order of arrival while their tokens fit the KV budget; a prompt that does not fit
yet keeps those behind it waiting, since it would starve otherwise.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common.transfer.alignment import Place
from prefill_service.job import PrefillJob
from prefill_service.packing import ChunkPlan


@dataclass(frozen=True)
class ScheduledChunk:
    job: PrefillJob
    plan: ChunkPlan


class Scheduler:
    """Used by the engine's thread alone."""

    def __init__(
        self,
        ratios: tuple[int, ...],
        chunk_tokens: int,
        step_tokens: int,
        budget_tokens: int,
        place: Place | None = None,
    ) -> None:
        self._place = place
        self._ratios = ratios
        self._chunk_tokens = chunk_tokens
        self._step_tokens = step_tokens
        self._budget_tokens = budget_tokens
        self._waiting: deque[PrefillJob] = deque()
        self._running: list[PrefillJob] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, job: PrefillJob) -> None:
        self._waiting.append(job)

    def join(self, job: PrefillJob) -> PrefillJob | None:
        """Lets the job share the computing of one with the same prompt, whose pages it still gets all as long as none
        was sent. Returns that one, or None."""
        for leader in (*self._running, *self._waiting):
            if leader.computed == 0 and leader.phase != "ended" and leader.computes_the_same(job):
                leader.sharers.append(job)
                return leader
        return None

    def drop_ended(self) -> list[PrefillJob]:
        """Forgets jobs that ended by other means (cancelled, failed) and returns them. Where others share one, the
        first of them takes its place."""
        ended: list[PrefillJob] = []
        for job in (*self._waiting, *self._running):
            over = [sharer for sharer in job.sharers if sharer.phase == "ended"]
            job.sharers = [sharer for sharer in job.sharers if sharer not in over]
            ended += over
            if job.phase != "ended":
                continue
            ended.append(job)
            if job.sharers:
                self._replace(job, job.hand_on())
            else:
                self.remove(job)
        return ended

    def _replace(self, job: PrefillJob, heir: PrefillJob) -> None:
        jobs = self._running if job in self._running else self._waiting
        jobs[jobs.index(job)] = heir

    def remove(self, job: PrefillJob) -> None:
        """The job is computed, or over."""
        if job in self._running:
            self._running.remove(job)
        else:
            self._waiting.remove(job)

    def admit(self) -> list[PrefillJob]:
        """Moves waiting prompts into the running set while the budget lasts; returns them."""
        used = sum(job.tokens for job in self._running)
        admitted: list[PrefillJob] = []
        while self._waiting and used + self._waiting[0].tokens <= self._budget_tokens:
            job = self._waiting.popleft()
            used += job.tokens
            self._running.append(job)
            admitted.append(job)
        return admitted

    def next_chunks(self) -> list[ScheduledChunk]:
        """The next chunk of each running prompt, oldest first, up to the step's tokens (one at least)."""
        chosen: list[ScheduledChunk] = []
        left = self._step_tokens
        for job in self._running:
            end = min(job.computed + self._chunk_tokens, job.tokens)
            size = end - job.computed
            if chosen and size > left:
                break
            left -= size
            chosen.append(ScheduledChunk(job, ChunkPlan(self._ratios, job.tokens, job.computed, end, self._place)))
        return chosen
