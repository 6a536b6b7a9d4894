"""Where prefill services write: one Mooncake session for each incarnation, so that one writer can be shut out.

All sessions register the same memory. A writer that vanished (killed, stopped, cut off, or with writes that failed
half-way) is fenced: its session ends for good, and only then is its memory anybody else's. A process that wakes up
later finds its connections closed and nothing registered behind its session's ports, which no other session gets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

from common.errors import ErrorReason, ServiceError
from common.transfer.engine import TransferEngine, TransferUnavailableError
from common.transfer.ticket import RegionTable

FENCE_ATTEMPT_S = 2.0
# Two ports and two idle threads each.
MAX_FENCED = 256


class Landings:
    """Used on the event loop alone. `make_engine` starts a transfer engine with nothing registered."""

    def __init__(self, make_engine: Callable[[], TransferEngine], regions: RegionTable) -> None:
        """Opens a first session, for whichever writer comes first. Raises TransferUnavailableError."""
        self._make_engine = make_engine
        self._regions = regions
        self._spare: TransferEngine | None = self._open()
        self._engines: dict[str, TransferEngine] = {}
        self._opening: dict[str, asyncio.Task[TransferEngine]] = {}
        self._fencing: dict[TransferEngine, asyncio.Task[bool]] = {}
        # Fenced engines are kept, idle, for their ports' sake.
        self._fenced: deque[TransferEngine] = deque()
        self.fences = 0

    @property
    def sessions(self) -> list[str]:
        """Those that accept writes."""
        engines = [*self._engines.values(), *([self._spare] if self._spare else [])]
        return [engine.session for engine in engines]

    async def open(self, incarnation: str) -> str:
        """The session for a writer. Raises ServiceError when Mooncake starts no more engines."""
        engine = self._engines.get(incarnation)
        if engine is not None:
            return engine.session
        opening = self._opening.get(incarnation)
        if opening is None:
            opening = self._opening[incarnation] = asyncio.create_task(self._open_for(incarnation))
        return (await asyncio.shield(opening)).session

    async def fence(self, incarnation: str, session: str) -> bool:
        """After True nothing that was sent to `session` by that writer can land any more. False: not proven yet."""
        engine = self._engines.get(incarnation)
        if engine is not None and engine.session == session:
            del self._engines[incarnation]
            self._fencing[engine] = asyncio.create_task(self._fence(engine))
        for fenced, attempt in list(self._fencing.items()):
            if fenced.session == session:
                return await self._attempt(fenced, attempt)
        return True

    async def retire(self, incarnation: str) -> None:
        """The writer's process was replaced: its session, if it has one, ends."""
        engine = self._engines.get(incarnation)
        if engine is not None:
            await self.fence(incarnation, engine.session)

    def close(self) -> None:
        """Nothing may be written any more by anybody."""
        for engine in [*self._engines.values(), *self._fencing, *([self._spare] if self._spare else [])]:
            engine.close()

    async def _open_for(self, incarnation: str) -> TransferEngine:
        spare, self._spare = self._spare, None
        try:
            engine = spare or await asyncio.to_thread(self._open)
        except TransferUnavailableError as error:
            raise ServiceError(
                ErrorReason.INTERNAL,
                f"no transfer session for a new writer: {error}; each takes two ports of transfer_min_port to "
                f"transfer_max_port, and {len(self._fenced)} fenced ones keep theirs until this service restarts",
                field="transfer_max_port",
            ) from None
        finally:
            del self._opening[incarnation]
        self._engines[incarnation] = engine
        structlog.get_logger().info("transfer session opened", session=engine.session, writer=incarnation)
        return engine

    async def _attempt(self, engine: TransferEngine, attempt: asyncio.Task[bool]) -> bool:
        """Waits for the present attempt; a failed one is begun again by whoever asks next."""
        done = await asyncio.shield(attempt)
        if not done and self._fencing.get(engine) is attempt:
            self._fencing[engine] = asyncio.create_task(self._fence(engine))
        return done

    async def _fence(self, engine: TransferEngine) -> bool:
        done = await asyncio.to_thread(engine.fence, FENCE_ATTEMPT_S)
        log = structlog.get_logger()
        if done:
            self._fencing.pop(engine, None)
            self._fenced.append(engine)
            self.fences += 1
            if len(self._fenced) > MAX_FENCED:
                log.warning("oldest fenced session destroyed, its ports are free", session=self._fenced[0].session)
                self._fenced.popleft()
            log.warning("transfer session fenced", session=engine.session)
        else:
            log.error("transfer session not fenced yet", session=engine.session)
        return done

    def _open(self) -> TransferEngine:
        engine = self._make_engine()
        for region in self._regions.items():
            engine.register(region.base, region.size, region.piece_bytes)
        return engine
