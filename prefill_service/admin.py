"""Operator calls on the prefill service."""

from __future__ import annotations

import time
from pathlib import Path

from common.rpc.gen.dsv4pd.v1 import admin_pb2, common_pb2
from common.rpc.worker import AdminBasics, Context, WorkerServer
from common.transfer.layout import HandoverLayout
from common.transfer.send_ring import SendRing
from common.transfer.sender import TransferSender
from common.version import VERSION
from prefill_service.engine import PrefillEngine
from prefill_service.metrics import PrefillMetrics
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
        metrics: PrefillMetrics,
        worker: WorkerServer,
        model_name: str,
        session: str,
        max_context_tokens: int,
    ) -> None:
        super().__init__(worker, layout, [], profiles)
        self._incarnation = incarnation
        self._engine = engine
        self._ring = ring
        self._sender = sender
        self._servicer = servicer
        self._metrics = metrics
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
            counters={"undrained_posts": float(self._sender.undrained())} | self._metrics.counts(),
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

    def set_draining(self, draining: bool) -> None:
        self._servicer.draining = draining

    def living_requests(self) -> int:
        return len(self._engine.jobs())

    def abort_requests(self, request_id: str) -> int:
        keys = [job.key for job in self._engine.jobs() if job.request_id == request_id]
        for key in keys:
            self._engine.cancel(key)
        return len(keys)
