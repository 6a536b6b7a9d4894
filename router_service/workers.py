"""The workers: who is known, who is usable, which one takes the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio
import structlog

from common.rpc.channels import open_channel
from common.rpc.gen.dsv4pd.v1 import admin_pb2
from common.rpc.tls import Tls
from router_service.breaker import Breaker, BreakerSettings
from router_service.client_context import client_context
from router_service.lanes import Lanes
from router_service.placement import PlacementSettings, choose_decode, choose_prefill, prefix_key
from router_service.worker import Role, Worker

__all__ = ["Worker", "WorkerPool"]


class WorkerPool:
    """Polls every worker; a worker that does not answer, is not ready or drains is not chosen until it is again.

    Static workers are known for ever, others from `join` to `leave`.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        interval_s: float,
        timeout_s: float,
        *,
        breaker: BreakerSettings | None = None,
        placement: PlacementSettings | None = None,
        lanes: Lanes | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._breaker = breaker or BreakerSettings()
        self._placement = placement or PlacementSettings()
        self.lanes = lanes or Lanes(slots=1 << 20, max_waiting=0)
        self._polls: dict[Worker, asyncio.Task[None]] = {}
        self._closings: set[asyncio.Task[None]] = set()
        self.prefill = [self._make("prefill", address, static=True) for address in prefill]
        self.decode = [self._make("decode", address, static=True) for address in decode]

    def _make(self, role: Role, address: str, *, static: bool) -> Worker:
        return Worker(role, address, open_channel(address, self._tls), static, Breaker(self._breaker))

    async def start(self) -> None:
        workers = [*self.prefill, *self.decode]
        await asyncio.gather(*(self._ask(worker) for worker in workers))
        for worker in workers:
            self._watch(worker)

    async def close(self) -> None:
        tasks = [*self._polls.values(), *self._closings]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in [*self.prefill, *self.decode]:
            await worker.channel.close()

    @property
    def ready(self) -> bool:
        """At least one of each kind is usable."""
        return any(w.can_take for w in self.prefill) and any(w.can_take for w in self.decode)

    @property
    def max_context_tokens(self) -> int:
        """The longest context that some usable decode worker takes; 0 = none is usable."""
        return max((w.context for w in self.decode if w.usable), default=0)

    def pick_decode(self, tokens: int, tried: frozenset[str] = frozenset()) -> Worker:
        """For `tokens` of prompt and output. Raises ServiceError."""
        return choose_decode(self.decode, tokens, client_context.get().session, tried)

    def pick_prefill(self, token_ids: Sequence[int], tried: frozenset[str] = frozenset()) -> Worker:
        """For this prompt. Raises ServiceError."""
        affinity = client_context.get().session or prefix_key(token_ids, self._placement.prefix_tokens)
        return choose_prefill(self.prefill, len(token_ids), affinity, self._placement.slack_tokens, tried)

    def join(self, role: Role, address: str, incarnation: str) -> None:
        """Makes a worker known, or knows it again; it is chosen once it answered."""
        workers = self._of(role)
        worker = next((w for w in workers if w.address == address), None)
        if worker is None:
            worker = self._make(role, address, static=False)
            workers.append(worker)
        elif worker.incarnation != incarnation:
            worker.lost("another process has its address")
        worker.leaving = False
        # Asked at once, not only when the running wait is over.
        self._watch(worker, at_once=True)

    def leave(self, role: Role, address: str, problem: str) -> None:
        """The worker is chosen no more; what it runs goes on."""
        for worker in [w for w in self._of(role) if w.address == address]:
            worker.lost(problem)
            if worker.static:
                continue
            worker.leaving = True
            closing = asyncio.create_task(self._forget(worker))
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)

    async def _forget(self, worker: Worker) -> None:
        while worker.leaving and worker.requests:
            await asyncio.sleep(self._interval_s)
        if not worker.leaving:
            return  # it came back meanwhile
        workers = self._of(worker.role)
        if worker in workers:
            workers.remove(worker)
            poll = self._polls.pop(worker, None)
            if poll is not None:
                poll.cancel()
            await worker.channel.close()

    def _of(self, role: Role) -> list[Worker]:
        return self.prefill if role == "prefill" else self.decode

    def _watch(self, worker: Worker, *, at_once: bool = False) -> None:
        before = self._polls.pop(worker, None)
        if before is not None:
            before.cancel()
        self._polls[worker] = asyncio.create_task(self._poll(worker, 0.0 if at_once else self._interval_s))

    async def _poll(self, worker: Worker, first_s: float) -> None:
        await asyncio.sleep(first_s)
        while True:
            await self._ask(worker)
            await asyncio.sleep(self._interval_s)

    async def _ask(self, worker: Worker) -> None:
        try:
            status = await worker.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            if worker.usable:
                structlog.get_logger().warning("worker lost", address=worker.address, detail=error.details())
            worker.lost(f"{error.code().name}: {error.details()}")
            return
        was_usable = worker.usable
        worker.answered(status)
        if worker.usable and not was_usable:
            structlog.get_logger().info("worker joined", address=worker.address, incarnation=status.incarnation.id)
