"""Operator calls on the decode service."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path

from common.errors import ErrorReason, ServiceError
from common.rpc.errors import abort
from common.rpc.gen.dsv4pd.v1 import admin_pb2, common_pb2
from common.rpc.ticket_messages import regions_to_messages
from common.rpc.worker import AdminBasics, Context, WorkerServer
from common.transfer.layout import HandoverLayout
from common.transfer.ticket import RegionTable
from common.version import VERSION
from decode_service.engine import DecodeEngine
from decode_service.extent_allocator import FRAGMENTATION
from decode_service.landings import Landings
from decode_service.metrics import DecodeMetrics
from decode_service.server import DecodeServicer

PHASES = ("queued", "prefilling", "running", "draining")


class DecodeAdmin(AdminBasics):
    def __init__(
        self,
        layout: HandoverLayout,
        regions: RegionTable,
        profiles: Path,
        incarnation: common_pb2.Incarnation,
        engine: DecodeEngine,
        servicer: DecodeServicer,
        worker: WorkerServer,
        model_name: str,
        landings: Landings,
        metrics: DecodeMetrics,
        max_context_tokens: int,
        item_bytes: dict[str, int],
    ) -> None:
        super().__init__(worker, layout, regions_to_messages(regions), profiles)
        self._incarnation = incarnation
        self._engine = engine
        self._servicer = servicer
        self._model_name = model_name
        self._landings = landings
        self._metrics = metrics
        self._max_context_tokens = max_context_tokens
        self._item_bytes = item_bytes

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusReply:
        if request.check_integrity:
            try:
                await asyncio.wrap_future(self._engine.check_integrity())
            except ValueError as error:
                await abort(context, ServiceError(ErrorReason.INTERNAL, f"integrity: {error}", field="integrity"))
        requests = self._engine.requests()
        counters = self._engine.hisparse.counters
        return admin_pb2.GetStatusReply(
            incarnation=self._incarnation,
            version=VERSION,
            draining=self._servicer.draining,
            ready=self._worker.ready,
            pools=[
                admin_pb2.PoolStatus(
                    name=use.name,
                    total=use.total,
                    free=use.free,
                    used=use.used,
                    quarantined=use.quarantined,
                    cached=use.cached,
                    item_bytes=self._item_bytes[use.name],
                )
                for use in self._engine.pools.use()
            ],
            phases=[
                admin_pb2.PhaseCount(
                    phase=phase,
                    requests=sum(r.phase == phase for r in requests),
                    tokens=sum(r.total_tokens for r in requests if r.phase == phase),
                )
                for phase in PHASES
            ],
            counters={
                "resident_hits": float(counters.resident),
                "hot_hits": float(counters.hits),
                "hot_misses": float(counters.misses),
                "backups": float(counters.backups),
                "resident_loads": float(counters.loads),
                "resident_spills": float(counters.spills),
                "fences": float(self._landings.fences),
                "quarantine_alarm": float(bool(self._servicer.quarantine_alarm())),
                "quarantine_oldest_s": self._servicer.quarantine_oldest_s(),
            }
            | {
                f"{name}_{what}": read(found)
                for name, found in self._engine.pools.fragmentation().items()
                for what, read in FRAGMENTATION.items()
            }
            | self._prefix_counts()
            | self._metrics.counts(),
            max_context_tokens=self._max_context_tokens,
            model_name=self._model_name,
            mooncake_session=",".join(self._landings.sessions),
        )

    def _prefix_counts(self) -> dict[str, float]:
        prefix = self._engine.pools.prefix
        return {f"prefix_{name}": float(n) for name, n in asdict(prefix.counters).items()} if prefix is not None else {}

    async def FlushCache(self, request: admin_pb2.FlushCacheRequest, context: Context) -> admin_pb2.FlushCacheReply:
        prefix = self._engine.pools.prefix
        freed = await asyncio.wrap_future(self._engine.call(prefix.clear)) if prefix is not None else 0
        return admin_pb2.FlushCacheReply(pages_freed=freed)

    async def ListRequests(
        self, request: admin_pb2.ListRequestsRequest, context: Context
    ) -> admin_pb2.ListRequestsReply:
        now = time.time_ns()
        return admin_pb2.ListRequestsReply(
            requests=[
                admin_pb2.RequestStatus(
                    key=common_pb2.RequestKey(request_id=r.request_id, generation=r.generation),
                    phase=r.phase,
                    prompt_tokens=r.prompt_tokens,
                    generated_tokens=len(r.sampling.generated),
                    max_tokens=r.sampling.settings.max_tokens,
                    age_s=(now - r.arrived_ns) / 1e9,
                    host_pages=len(r.resources.host_pages) if r.resources else 0,
                    logical_pages=len(r.resources.logical_pages) if r.resources else 0,
                    peer=r.peer,
                )
                for r in self._engine.requests()
            ]
        )

    def set_draining(self, draining: bool) -> None:
        self._servicer.draining = draining

    def living_requests(self) -> int:
        return len(self._engine.requests())

    def abort_requests(self, request_id: str) -> int:
        found = [r for r in self._engine.requests() if r.request_id == request_id]
        for each in found:
            self._engine.abort(each)
        return len(found)
