"""Signals that end a service: the first one starts its end, further ones change nothing."""

from __future__ import annotations

import asyncio
import signal
import types

_ENDING = (signal.SIGTERM, signal.SIGINT)


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set. Call inside the running loop, on the main thread.

    Not by the loop's own handlers: those go with the loop, and a second SIGTERM that comes while the interpreter
    is being torn down would then kill a process that ends well.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def set_stop(_: int, __: types.FrameType | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    for number in _ENDING:
        signal.signal(number, set_stop)
    return stop


def ignore_signals() -> None:
    """The service has ended and only the interpreter's own end is left."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
