"""The Registry service: workers register, renew their lease, and are forgotten when it ends."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio
import structlog

from common.addresses import is_address
from common.errors import ErrorReason, ServiceError
from common.rpc.errors import abort
from common.rpc.gen.dsv4pd.v1 import registry_pb2, registry_pb2_grpc
from router_service.worker import Role

Context = grpc.aio.ServicerContext[Any, Any]
MAX_LEASES = 1024


class Members(Protocol):
    """Who is told; the worker pool."""

    def join(self, role: Role, address: str, incarnation: str) -> None: ...

    def leave(self, role: Role, address: str, problem: str) -> None: ...


@dataclass
class _Lease:
    role: Role
    address: str
    incarnation: str
    ends: float


class Registry(registry_pb2_grpc.RegistryServicer):
    """Leases by id; at most one an address."""

    def __init__(self, members: Members, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._members = members
        self._lease_s = lease_s
        self._clock = clock
        self._leases: dict[str, _Lease] = {}

    async def Register(self, request: registry_pb2.RegisterRequest, context: Context) -> registry_pb2.RegisterReply:
        try:
            lease_id = self.register(request.incarnation.service, request.address, request.incarnation.id)
        except ServiceError as error:
            await abort(context, error)
        return registry_pb2.RegisterReply(lease_id=lease_id, lease_s=self._lease_s)

    async def Heartbeat(self, request: registry_pb2.HeartbeatRequest, context: Context) -> registry_pb2.HeartbeatReply:
        lease = self._leases.get(request.lease_id)
        if lease is None:
            await abort(context, ServiceError(ErrorReason.NOT_FOUND, "no such lease: register again", field="lease_id"))
        lease.ends = self._clock() + self._lease_s
        return registry_pb2.HeartbeatReply(lease_s=self._lease_s)

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: Context
    ) -> registry_pb2.DeregisterReply:
        lease = self._leases.pop(request.lease_id, None)
        if lease is not None:
            self._leave(lease, "it left")
        return registry_pb2.DeregisterReply()

    def register(self, service: str, address: str, incarnation: str) -> str:
        """Returns the lease's id. Raises ServiceError for what is no worker's."""
        if service not in ("prefill", "decode"):
            message = f'incarnation.service is {service!r}, neither "prefill" nor "decode"'
            raise ServiceError(ErrorReason.INVALID_REQUEST, message, field="incarnation.service", theirs=service)
        if not is_address(address):
            message = f"address {address!r} is not host:port"
            raise ServiceError(ErrorReason.INVALID_REQUEST, message, field="address", theirs=address)
        role: Role = "prefill" if service == "prefill" else "decode"
        for lease_id, lease in list(self._leases.items()):
            if (lease.role, lease.address) == (role, address):
                del self._leases[lease_id]
        if len(self._leases) >= MAX_LEASES:
            raise ServiceError(
                ErrorReason.QUEUE_FULL, f"{MAX_LEASES} workers are registered", retry_after_s=self._lease_s
            )
        lease_id = secrets.token_hex(16)
        self._leases[lease_id] = _Lease(role, address, incarnation, self._clock() + self._lease_s)
        structlog.get_logger().info("worker registered", role=role, address=address, incarnation=incarnation)
        self._members.join(role, address, incarnation)
        return lease_id

    def expire(self) -> None:
        """Forgets workers whose lease is over."""
        now = self._clock()
        for lease_id, lease in list(self._leases.items()):
            if lease.ends <= now:
                del self._leases[lease_id]
                self._leave(lease, f"it sent no heartbeat for {self._lease_s:g} s")

    async def run(self) -> None:
        """Expires leases until it is cancelled."""
        while True:
            await asyncio.sleep(min(0.5, self._lease_s / 4))
            self.expire()

    def _leave(self, lease: _Lease, problem: str) -> None:
        structlog.get_logger().info("worker left", role=lease.role, address=lease.address, why=problem)
        self._members.leave(lease.role, lease.address, problem)
