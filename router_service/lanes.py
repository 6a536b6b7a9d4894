"""Bounds how many choices are at the workers; the others wait, the more urgent first."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common import tracing
from common.errors import ErrorReason, ServiceError

# Of so many free slots one goes to whoever has waited longest, so that no lane stands still.
OLDEST_EVERY = 4


@dataclass(order=True)
class _Waiting:
    priority: int
    number: int
    turn: asyncio.Future[None] = field(compare=False)


class Lanes:
    """`slots` choices at a time. A lower `priority` goes first, as in other servers; equals in order of arrival."""

    def __init__(self, slots: int, max_waiting: int, on_wait: Callable[[float], None] = lambda _: None) -> None:
        self._slots = slots
        self._max_waiting = max_waiting
        self._on_wait = on_wait
        self._taken = 0
        self._waiting: list[_Waiting] = []
        self._arrived = 0
        self._turns = 0

    @property
    def running(self) -> int:
        return self._taken

    @property
    def waiting(self) -> int:
        return sum(not w.turn.done() for w in self._waiting)

    @asynccontextmanager
    async def slot(self, priority: int, timeout_s: float) -> AsyncGenerator[None]:
        """A slot until the block ends. Raises ServiceError (QUEUE_FULL) when too many wait, or for too long."""
        begun = time.monotonic()
        span = tracing.child("queue")
        try:
            await self._take(priority, timeout_s)
        finally:
            span.end()
        try:
            self._on_wait(time.monotonic() - begun)
            yield
        finally:
            self._give()

    async def _take(self, priority: int, timeout_s: float) -> None:
        if self._taken < self._slots:
            self._taken += 1
            return
        waiting = self.waiting
        if waiting >= self._max_waiting:
            raise ServiceError(ErrorReason.QUEUE_FULL, f"{waiting} choices wait already", retry_after_s=1.0)
        self._arrived += 1
        mine = _Waiting(priority, self._arrived, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, mine)
        try:
            async with asyncio.timeout(timeout_s):
                await mine.turn
        except BaseException as error:
            if mine.turn.done() and not mine.turn.cancelled():
                self._give()  # the slot came in the same moment
            mine.turn.cancel()
            if isinstance(error, TimeoutError):
                message = f"no slot came free within {timeout_s:g} s"
                raise ServiceError(ErrorReason.QUEUE_FULL, message, retry_after_s=1.0) from None
            raise

    def _give(self) -> None:
        """Hands the slot to the next who still waits, or back."""
        self._waiting = [w for w in self._waiting if not w.turn.done()]
        if not self._waiting:
            self._taken -= 1
            return
        heapq.heapify(self._waiting)
        self._turns += 1
        if self._turns % OLDEST_EVERY == 0:
            chosen = min(self._waiting, key=lambda w: w.number)
            self._waiting.remove(chosen)
            heapq.heapify(self._waiting)
        else:
            chosen = heapq.heappop(self._waiting)
        chosen.turn.set_result(None)
