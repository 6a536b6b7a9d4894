"""Keeps requests away from a worker that fails them, and lets one try it again after a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

State = Literal["closed", "half_open", "open"]
LONGEST_OPEN = 8


@dataclass(frozen=True)
class BreakerSettings:
    failures: int = 5
    """Failures in a row that open it."""
    open_s: float = 5.0
    """Seconds it stays open the first time; doubled, up to eight times, while the request that tries fails."""


@dataclass
class Breaker:
    """Closed until `failures` requests in a row failed, then open; when that time is over one request tries.

    A request counts from `begin` to exactly one of `succeeded`, `failed` and `left`. Only what is the worker's fault
    is a failure; a request that the client or an operator ended has no verdict (`left`).
    """

    settings: BreakerSettings = field(default_factory=BreakerSettings)
    clock: Callable[[], float] = time.monotonic
    _in_a_row: int = 0
    _opened: int = 0
    _open_until: float = 0.0
    _trying: bool = False

    @property
    def state(self) -> State:
        if not self._opened:
            return "closed"
        return "open" if self.clock() < self._open_until else "half_open"

    def allows(self) -> bool:
        """Whether a request may be sent now."""
        state = self.state
        return state == "closed" or (state == "half_open" and not self._trying)

    def begin(self) -> None:
        self._trying = self._trying or self.state == "half_open"

    def succeeded(self) -> None:
        self.reset()

    def failed(self) -> None:
        self._in_a_row += 1
        # Requests sent before it opened fail one after the other: they don't prolong it.
        if self.state == "open" or (self.state == "closed" and self._in_a_row < self.settings.failures):
            return
        self._trying = False
        self._open_until = self.clock() + self.settings.open_s * min(2**self._opened, LONGEST_OPEN)
        self._opened += 1

    def left(self) -> None:
        self._trying = False

    def reset(self) -> None:
        """Forgets everything: the worker did well, or is another process."""
        self._in_a_row = self._opened = 0
        self._trying = False
