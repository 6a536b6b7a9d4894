"""The router's gRPC door: the registry, with health and reflection as on the workers."""

from __future__ import annotations

import asyncio

import structlog

from common.rpc.gen.dsv4pd.v1 import registry_pb2_grpc
from common.rpc.tls import Tls
from common.rpc.worker import WorkerServer
from router_service.registry import Members, Registry
from router_service.settings import RouterSettings

SERVICES = ("dsv4pd.v1.Registry",)


class RegistryServer:
    """A running registry, or none where that is off."""

    def __init__(self, server: WorkerServer | None = None, expiry: asyncio.Task[None] | None = None) -> None:
        self._server = server
        self._expiry = expiry

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(0.5)


async def serve_registry(settings: RouterSettings, members: Members, tls: Tls | None = None) -> RegistryServer:
    """Starts it where a registry_port is set. Raises OSError when the port is taken."""
    if not settings.registry_port:
        return RegistryServer()
    server = WorkerServer(SERVICES, tls)
    registry = Registry(members, settings.lease_s)
    registry_pb2_grpc.add_RegistryServicer_to_server(registry, server.server)
    address = await server.start(settings.registry_host or settings.host, settings.registry_port, None)
    await server.set_ready(True)
    structlog.get_logger().info("registry listens", address=address, lease_s=settings.lease_s)
    return RegistryServer(server, asyncio.create_task(registry.run()))
