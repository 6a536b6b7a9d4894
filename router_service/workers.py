"""The workers: who is usable, how busy each is, which one takes the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio
import structlog

from common.errors import ErrorReason, ServiceError
from common.rpc.channels import open_channel
from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc, decode_pb2_grpc


@dataclass
class Worker:
    """One address. `load` is what its last status said, `outstanding` what this router has sent since."""

    address: str
    channel: grpc.aio.Channel
    usable: bool = False
    load: float = 0.0
    outstanding: float = 0.0
    context: int = 0
    requests: int = 0
    problem: str = "not asked yet"
    admin: admin_pb2_grpc.AdminStub = field(init=False)

    def __post_init__(self) -> None:
        self.admin = admin_pb2_grpc.AdminStub(self.channel)

    @property
    def decode(self) -> decode_pb2_grpc.DecodeStub:
        return decode_pb2_grpc.DecodeStub(self.channel)


def _free_host_pages(status: admin_pb2.GetStatusReply) -> float:
    return float(sum(pool.free for pool in status.pools if pool.name == "host_c4"))


def _queued_tokens(status: admin_pb2.GetStatusReply) -> float:
    return float(sum(phase.tokens for phase in status.phases if phase.phase in ("queued", "computing")))


def _long_enough(workers: list[Worker], tokens: int) -> list[Worker]:
    """Those whose context holds so many tokens; all if none does, as a worker's own refusal names its limit."""
    return [w for w in workers if w.context >= tokens] or workers


class WorkerPool:
    """Polls every worker; a worker that does not answer, is not ready or drains is not chosen until it is again."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], interval_s: float, timeout_s: float) -> None:
        self.prefill = [Worker(address, open_channel(address)) for address in prefill]
        self.decode = [Worker(address, open_channel(address)) for address in decode]
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._polls: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await asyncio.gather(*(self._ask(worker) for worker in [*self.prefill, *self.decode]))
        self._polls = [asyncio.create_task(self._poll(worker)) for worker in [*self.prefill, *self.decode]]

    async def close(self) -> None:
        for poll in self._polls:
            poll.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)
        for worker in [*self.prefill, *self.decode]:
            await worker.channel.close()

    @property
    def ready(self) -> bool:
        """At least one of each kind is usable."""
        return any(w.usable for w in self.prefill) and any(w.usable for w in self.decode)

    @property
    def max_context_tokens(self) -> int:
        """The longest context that some usable decode worker takes; 0 = none is usable."""
        return max((w.context for w in self.decode if w.usable), default=0)

    def pick_decode(self, tokens: int, tried: frozenset[str] = frozenset()) -> Worker:
        """The usable worker with the most free host pages, of those that take `tokens` of prompt and output where
        there are such. Raises ServiceError."""
        usable = _long_enough([w for w in self.decode if w.usable and w.address not in tried], tokens)
        if not usable:
            raise ServiceError(ErrorReason.DECODE_UNAVAILABLE, self._why("decode", self.decode), retry_after_s=1.0)
        return max(usable, key=lambda w: (w.load - w.outstanding, -w.requests))

    def pick_prefill(self, tokens: int) -> Worker:
        """The usable worker with the fewest prompt tokens to compute, of those that take a prompt of `tokens` where
        there are such. Raises ServiceError."""
        usable = _long_enough([w for w in self.prefill if w.usable], tokens)
        if not usable:
            raise ServiceError(ErrorReason.PREFILL_UNAVAILABLE, self._why("prefill", self.prefill), retry_after_s=1.0)
        return min(usable, key=lambda w: (w.load + w.outstanding, w.requests))

    def failed(self, worker: Worker, problem: str) -> None:
        """A call found the worker gone: don't choose it until it answers a poll."""
        worker.usable = False
        worker.problem = problem

    def _why(self, role: str, workers: Sequence[Worker]) -> str:
        problems = "; ".join(f"{w.address}: {w.problem}" for w in workers)
        return f"no {role} worker is usable ({problems})"

    async def _poll(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._ask(worker)

    async def _ask(self, worker: Worker) -> None:
        try:
            status = await worker.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            if worker.usable:
                structlog.get_logger().warning("worker lost", address=worker.address, detail=error.details())
            self.failed(worker, f"{error.code().name}: {error.details()}")
            return
        if not worker.usable and status.ready:
            structlog.get_logger().info("worker joined", address=worker.address, incarnation=status.incarnation.id)
        worker.usable = status.ready and not status.draining
        worker.problem = "" if worker.usable else "draining" if status.draining else "not ready"
        worker.context = status.max_context_tokens
        worker.load = _free_host_pages(status) if worker in self.decode else _queued_tokens(status)
        worker.outstanding = 0.0
