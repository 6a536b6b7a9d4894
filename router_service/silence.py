"""Ends a call whose peer says nothing for too long, with one timer for all of its thousands of events."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Cancellable(Protocol):
    def cancel(self) -> bool: ...


class Silence:
    """Cancels the call when `heard` was not called for `timeout_s`; `cut` then says that it was this."""

    def __init__(self, call: Cancellable, timeout_s: float) -> None:
        self.cut = False
        self._call = call
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._timer = self._loop.call_later(timeout_s, self._check)

    def heard(self) -> None:
        self._last_s = self._loop.time()

    def end(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        left_s = self._last_s + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check)
            return
        self.cut = True
        self._call.cancel()
