"""What both workers are made of on the gRPC side: server, health, reflection, admin basics."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from common.config import WorkerSettings
from common.errors import ErrorReason, ServiceError
from common.logging import set_log_level
from common.rpc.admin_guard import AdminGuard, AdminRole
from common.rpc.channels import listen, make_server
from common.rpc.errors import abort
from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from common.rpc.layout_messages import to_message
from common.rpc.profiler import Profiler
from common.rpc.request_scope import RequestScope
from common.rpc.tls import Tls
from common.transfer.layout import HandoverLayout

# For the last events of requests that are over; it ends earlier when they have been read.
STOP_GRACE_S = 2.0

Context = grpc.aio.ServicerContext[Any, Any]


def secured(
    settings: WorkerSettings, service_names: Sequence[str], tls: Tls | None, scope: RequestScope
) -> WorkerServer:
    """A worker's server, whose Admin service is for administrators. Raises ValueError for settings that can't work."""
    role = AdminRole.of(settings.admin_token_sha256, settings.admin_names, tls=tls is not None)
    return WorkerServer(service_names, tls, [scope, AdminGuard(role)])


class WorkerServer:
    """A grpc.aio server with health (SERVING only between `set_ready(True)` and the next False)."""

    def __init__(
        self,
        service_names: Sequence[str],
        tls: Tls | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self.server = make_server(interceptors)
        self._tls = tls
        self.ready = False
        self._names = ["", *service_names]
        self._health: Any = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        shown = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(shown, self.server)

    async def start(self, host: str, port: int, port_file: Path | None) -> str:
        """Listens; returns "host:port". Raises OSError when the port is taken."""
        address = listen(self.server, host, port, self._tls)
        await self.set_ready(False)
        await self.server.start()
        if port_file is not None:
            partial = port_file.with_suffix(".partial")
            partial.write_text(address, encoding="utf-8")
            partial.replace(port_file)
        return address

    async def set_ready(self, ready: bool) -> None:
        self.ready = ready
        serving = health_pb2.HealthCheckResponse.ServingStatus
        status = serving.SERVING if ready else serving.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        await self.set_ready(False)
        await self.server.stop(grace_s)


def serve_metrics(port: int, host: str, registry: CollectorRegistry) -> None:
    """Serves the registry over HTTP on a thread of its own; port 0 = off."""
    if port:
        start_http_server(port, host, registry)


class AdminBasics(admin_pb2_grpc.AdminServicer, ABC):
    """The admin calls that are the same on both workers; what differs are GetStatus, ListRequests and the
    three methods at the end."""

    def __init__(
        self, worker: WorkerServer, layout: HandoverLayout, regions: Sequence[common_pb2.Region], profiles: Path
    ) -> None:
        self._worker = worker
        self._layout = layout
        self._regions = regions
        self._profiler = Profiler(profiles)
        self._timers: set[asyncio.Task[None]] = set()

    async def AbortRequest(
        self, request: admin_pb2.AbortRequestRequest, context: Context
    ) -> admin_pb2.AbortRequestReply:
        if not request.request_id:
            await abort(context, ServiceError(ErrorReason.INVALID_REQUEST, "request_id is empty", field="request_id"))
        aborted = self.abort_requests(request.request_id)
        if not aborted:
            error = ServiceError(ErrorReason.NOT_FOUND, f"no request {request.request_id!r} here", field="request_id")
            await abort(context, error)
        return admin_pb2.AbortRequestReply(aborted=aborted)

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainReply:
        return admin_pb2.DrainReply(running=await self.drain(request.grace_s))

    async def Resume(self, request: admin_pb2.ResumeRequest, context: Context) -> admin_pb2.ResumeReply:
        self.set_draining(False)
        await self._worker.set_ready(True)
        return admin_pb2.ResumeReply()

    async def FlushCache(self, request: admin_pb2.FlushCacheRequest, context: Context) -> admin_pb2.FlushCacheReply:
        # Prefill keeps nothing of requests that are over; decode has its own answer.
        return admin_pb2.FlushCacheReply(pages_freed=0)

    async def drain(self, grace_s: float) -> int:
        """Takes no new requests and waits for the present ones, for ever with 0; returns how many are left."""
        self.set_draining(True)
        await self._worker.set_ready(False)
        structlog.get_logger().info("draining", grace_s=grace_s)
        end = time.monotonic() + grace_s if grace_s > 0 else float("inf")
        while self.living_requests() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return self.living_requests()

    async def GetLayout(self, request: admin_pb2.GetLayoutRequest, context: Context) -> admin_pb2.GetLayoutReply:
        return admin_pb2.GetLayoutReply(layout=to_message(self._layout), regions=self._regions)

    async def SetLogLevel(self, request: admin_pb2.SetLogLevelRequest, context: Context) -> admin_pb2.SetLogLevelReply:
        try:
            previous = set_log_level(request.level)
        except ValueError as error:
            await abort(context, ServiceError(ErrorReason.INVALID_REQUEST, str(error), field="level"))
        structlog.get_logger().info("log level changed", previous=previous, level=request.level)
        return admin_pb2.SetLogLevelReply(previous=previous)

    async def StartProfile(
        self, request: admin_pb2.StartProfileRequest, context: Context
    ) -> admin_pb2.StartProfileReply:
        try:
            started = await self._profiler.start()
        except ServiceError as error:
            await abort(context, error)
        if request.duration_s > 0:
            task = asyncio.create_task(self._stop_later(request.duration_s))
            self._timers.add(task)
            task.add_done_callback(self._timers.discard)
        return admin_pb2.StartProfileReply(profile_id=started)

    async def StopProfile(self, request: admin_pb2.StopProfileRequest, context: Context) -> admin_pb2.StopProfileReply:
        try:
            path = await self._profiler.stop()
        except ServiceError as error:
            await abort(context, error)
        return admin_pb2.StopProfileReply(path=str(path))

    async def _stop_later(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        try:
            path = await self._profiler.stop()
        except ServiceError:
            return
        structlog.get_logger().info("profile written", path=str(path))

    @abstractmethod
    def set_draining(self, draining: bool) -> None:
        """Whether new requests are refused."""

    @abstractmethod
    def living_requests(self) -> int:
        """Requests that are not over."""

    @abstractmethod
    def abort_requests(self, request_id: str) -> int:
        """Ends the living requests of that id; returns how many there were."""
