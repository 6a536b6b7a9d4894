"""Which requests' memory is set aside, since when, and when that is worth an alarm."""

from __future__ import annotations

import time
from collections.abc import Sequence

from decode_service.resources import PoolUse


class Quarantine:
    """Used on the event loop; the readers may be called from any thread."""

    def __init__(self, alarm_s: float, max_share: float) -> None:
        """An alarm when memory is set aside for longer than `alarm_s` or more than `max_share` of a pool is."""
        self._alarm_s = alarm_s
        self._max_share = max_share
        self._since: dict[int, float] = {}

    def enter(self, generation: int) -> None:
        self._since[generation] = time.monotonic()

    def leave(self, generation: int) -> float:
        """Returns for how many seconds it was set aside."""
        return time.monotonic() - self._since.pop(generation)

    def oldest_s(self) -> float:
        """Seconds for which the oldest has been set aside, 0 when nothing is."""
        since = list(self._since.values())
        return time.monotonic() - min(since) if since else 0.0

    def alarm(self, pools: Sequence[PoolUse]) -> str:
        """Why somebody should look, or ""."""
        oldest = self.oldest_s()
        if oldest > self._alarm_s:
            return f"memory is in quarantine for {oldest:.0f} s"
        for use in pools:
            if use.quarantined > self._max_share * use.total:
                return f"{use.quarantined} of {use.total} {use.name} are in quarantine"
        return ""
