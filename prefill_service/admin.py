"""Operator calls on the prefill service."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from common.errors import ErrorReason, ServiceError
from common.rpc.errors import abort
from common.rpc.gen.dsv4pd.v1 import admin_pb2, common_pb2
from common.rpc.worker import AdminBasics, Context, WorkerServer
from common.transfer.layout import HandoverLayout
from common.transfer.send_ring import SendRing
from common.transfer.sender import TransferSender
from common.version import VERSION
from prefill_service.engine import PrefillEngine
from prefill_service.server import PrefillServicer

PHASES = ("queued", "computing", "sending", "ended")


class PrefillAdmin(AdminBasics):
    def __init__(
        self,
        layout: HandoverLayout,
        profiles: Path,
        incarnation: common_pb2.Incarnation,
        engine: PrefillEngine,
        ring: SendRing,
        sender: TransferSender,
        servicer: PrefillServicer,
        worker: WorkerServer,
        model_name: str,
        session: str,
        max_context_tokens: int,
    ) -> None:
        super().__init__(layout, [], profiles)
        self._incarnation = incarnation
        self._engine = engine
        self._ring = ring
        self._sender = sender
        self._servicer = servicer
        self._worker = worker
        self._model_name = model_name
        self._session = session
        self._max_context_tokens = max_context_tokens

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusReply:
        jobs = self._engine.jobs()
        used = self._ring.used
        return admin_pb2.GetStatusReply(
            incarnation=self._incarnation,
            version=VERSION,
            draining=self._servicer.draining,
            ready=self._worker.ready,
            pools=[
                admin_pb2.PoolStatus(
                    name="send_ring", total=self._ring.size, used=used, free=self._ring.size - used, item_bytes=1
                )
            ],
            phases=[
                admin_pb2.PhaseCount(
                    phase=phase,
                    requests=sum(job.phase == phase for job in jobs),
                    tokens=sum(job.tokens - job.computed for job in jobs if job.phase == phase),
                )
                for phase in PHASES
            ],
            counters={"undrained_posts": float(self._sender.undrained())},
            max_context_tokens=self._max_context_tokens,
            model_name=self._model_name,
            mooncake_session=self._session,
        )

    async def ListRequests(
        self, request: admin_pb2.ListRequestsRequest, context: Context
    ) -> admin_pb2.ListRequestsReply:
        now = time.time_ns()
        return admin_pb2.ListRequestsReply(
            requests=[
                admin_pb2.RequestStatus(
                    key=common_pb2.RequestKey(request_id=job.request_id, generation=int(job.key.rpartition("#")[2])),
                    phase=job.phase,
                    prompt_tokens=job.tokens,
                    age_s=(now - job.arrived_ns) / 1e9,
                    host_pages=len(job.ticket.host_pages),
                    logical_pages=len(job.ticket.logical_pages),
                    peer=job.ticket.session,
                )
                for job in self._engine.jobs()
            ]
        )

    async def AbortRequest(
        self, request: admin_pb2.AbortRequestRequest, context: Context
    ) -> admin_pb2.AbortRequestReply:
        if not request.request_id:
            await abort(context, ServiceError(ErrorReason.INVALID_REQUEST, "request_id is empty", field="request_id"))
        keys = [job.key for job in self._engine.jobs() if job.request_id == request.request_id]
        if not keys:
            await abort(
                context,
                ServiceError(ErrorReason.NOT_FOUND, f"no request {request.request_id!r} here", field="request_id"),
            )
        for key in keys:
            self._engine.cancel(key)
        return admin_pb2.AbortRequestReply(aborted=len(keys))

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainReply:
        running = await self.drain(request.grace_s)
        return admin_pb2.DrainReply(running=running)

    async def Resume(self, request: admin_pb2.ResumeRequest, context: Context) -> admin_pb2.ResumeReply:
        self._servicer.draining = False
        await self._worker.set_ready(True)
        return admin_pb2.ResumeReply()

    async def FlushCache(self, request: admin_pb2.FlushCacheRequest, context: Context) -> admin_pb2.FlushCacheReply:
        # Prompts are not kept here after their handover, so there is nothing to free.
        return admin_pb2.FlushCacheReply(pages_freed=0)

    async def drain(self, grace_s: float) -> int:
        """Takes no new prompts and waits for the present ones, for ever with 0; returns how many are left."""
        self._servicer.draining = True
        await self._worker.set_ready(False)
        structlog.get_logger().info("draining", grace_s=grace_s)
        end = time.monotonic() + grace_s if grace_s > 0 else float("inf")
        while self._engine.jobs() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return len(self._engine.jobs())
