"""A bound on bytes a second: for links that others need too, and for tests that want a transfer to last."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_WAIT_S = 0.01


class Pace:
    """At most `bytes_per_s` on average, 0 = no bound. Used by one thread."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._next = 0.0

    def wait(self, size: int, deadline: float, stopped: Callable[[], bool]) -> None:
        """Returns when `size` bytes may go, at `deadline` (of time.monotonic) or soon after `stopped()`."""
        if not self._bytes_per_s:
            return
        now = time.monotonic()
        while now < min(self._next, deadline) and not stopped():
            time.sleep(min(MAX_WAIT_S, min(self._next, deadline) - now))
            now = time.monotonic()
        self._next = max(now, self._next) + size / self._bytes_per_s
