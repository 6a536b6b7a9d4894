"""Ends work when its client leaves: servers don't cancel a handler that has not begun to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

T = TypeVar("T")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientGoneError when the client disconnects first. The body must
    have been read before."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
