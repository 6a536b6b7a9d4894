"""One torch profile at a time, written as a Chrome trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ErrorReason, ServiceError

T = TypeVar("T")


class Profiler:
    """Sees the operations of all threads. torch ends the process when a profile is stopped on another thread than
    the one that started it, so a thread of its own does both."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "profiler")
        self._running: Any = None
        self._id = ""

    async def start(self) -> str:
        """The profile's id. Raises ServiceError when one is running."""
        return await self._on_thread(self._start)

    async def stop(self) -> Path:
        """Where the trace is. Raises ServiceError when none is running."""
        return await self._on_thread(self._stop)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _start(self) -> str:
        from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
        from torch.profiler import ProfilerActivity, profile

        if self._running is not None:
            raise ServiceError(ErrorReason.INVALID_REQUEST, f"profile {self._id} is running", field="profile")
        running = profile(
            activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)
        )
        running.__enter__()
        self._running = running
        self._id = time.strftime("%Y%m%d-%H%M%S")
        return self._id

    def _stop(self) -> Path:
        if self._running is None:
            raise ServiceError(ErrorReason.NOT_FOUND, "no profile is running", field="profile")
        running, self._running = self._running, None
        running.__exit__(None, None, None)
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"profile-{self._id}.json"
        running.export_chrome_trace(str(path))
        return path
