"""A worker's side of the Registry: it makes itself known to routers and stays so until it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

import grpc
import grpc.aio
import structlog

from common.addresses import is_address, parse_addresses
from common.config import WorkerSettings
from common.rpc.channels import open_channel
from common.rpc.gen.dsv4pd.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from common.rpc.tls import Tls

CALL_TIMEOUT_S = 2.0
RESOLVE_INTERVAL_S = 5.0
AGAIN_S = 0.5
HEARTBEATS_A_LEASE = 4
_ANY_ADDRESS = ("0.0.0.0", "::", "[::]")  # noqa: S104 - compared with, not bound


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve_all(host: str, port: int) -> list[str]:
    """Every IP address of a host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in found})


class Registration:
    """One worker's registration with several routers, each by itself: a router that restarts is told again. A name that
    stands for several addresses (a headless Service, scaled containers) is registered with at each, and asked about
    again every few seconds."""

    def __init__(
        self, settings: WorkerSettings, incarnation: common_pb2.Incarnation, tls: Tls | None = None,
        resolve: Resolve = resolve_all,
    ) -> None:  # fmt: skip
        """Raises ValueError for settings that can't work."""
        self._routers = parse_addresses("register_with", settings.register_with)
        self._advertised = settings.advertise_address
        if self._advertised and not is_address(self._advertised):
            raise ValueError(f"advertise_address = {self._advertised!r} is not host:port")
        if self._routers and not self._advertised and settings.host in _ANY_ADDRESS:
            raise ValueError(f"register_with needs advertise_address: others can't reach {settings.host}")
        self._request = registry_pb2.RegisterRequest(incarnation=incarnation)
        self._tls = tls
        self._resolve = resolve
        self._resolving: list[asyncio.Task[None]] = []
        # By address, an IP and a port.
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leases: dict[str, str] = {}

    def start(self, address: str) -> None:
        """`address` is where the worker listens."""
        self._request.address = self._advertised or address
        self._resolving = [asyncio.create_task(self._follow(name)) for name in self._routers]

    async def close(self) -> None:
        """Tells the routers that the worker leaves; those that can't be told notice when the lease ends."""
        for tasks in (self._resolving, list(self._tasks.values())):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._deregister(router) for router in list(self._leases)))
        for channel in self._channels.values():
            await channel.close()

    async def _follow(self, name: str) -> None:
        """Keeps one registration for each address behind a name."""
        host, _, port = name.rpartition(":")
        mine: set[str] = set()
        while True:
            try:
                ips = await self._resolve(host.strip("[]"), int(port))
            except OSError as error:
                # What is registered stays so: a name server that is away is no reason to leave.
                structlog.get_logger().warning("router's name is not known", router=name, detail=str(error))
                ips = None
            if ips is not None:
                found = {f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in ips}
                for address in sorted(found - mine):
                    self._begin(address, host)
                for address in mine - found:
                    await self._drop(address)
                mine = found
            await asyncio.sleep(RESOLVE_INTERVAL_S if mine else AGAIN_S)

    def _begin(self, address: str, name: str) -> None:
        if address not in self._tasks:
            self._channels[address] = open_channel(address, self._tls, "" if address.startswith(f"{name}:") else name)
            self._tasks[address] = asyncio.create_task(self._keep(address))

    async def _drop(self, address: str) -> None:
        """The name does not stand for this address any more."""
        self._tasks.pop(address).cancel()
        self._leases.pop(address, None)
        await self._channels.pop(address).close()

    async def _keep(self, router: str) -> None:
        stub = registry_pb2_grpc.RegistryStub(self._channels[router])
        log = structlog.get_logger()
        known = False
        while True:
            try:
                reply = await stub.Register(self._request, timeout=CALL_TIMEOUT_S)
                log.info("registered", router=router, address=self._request.address, lease_s=reply.lease_s)
                known = True
                self._leases[router] = reply.lease_id
                await self._beat(stub, reply.lease_id, reply.lease_s)
            except grpc.aio.AioRpcError as error:
                if known or error.code() != grpc.StatusCode.UNAVAILABLE:
                    log.warning("not registered", router=router, code=error.code().name, detail=error.details())
                known = False
                self._leases.pop(router, None)
            await asyncio.sleep(AGAIN_S)

    async def _beat(self, stub: registry_pb2_grpc.RegistryStub, lease_id: str, lease_s: float) -> None:
        """Renews the lease until the router does not know it any more, or can't be reached for all of a lease."""
        request = registry_pb2.HeartbeatRequest(lease_id=lease_id)
        missed = 0
        while True:
            await asyncio.sleep(lease_s / HEARTBEATS_A_LEASE)
            try:
                await stub.Heartbeat(request, timeout=CALL_TIMEOUT_S)
                missed = 0
            except grpc.aio.AioRpcError as error:
                missed += 1
                if error.code() == grpc.StatusCode.NOT_FOUND or missed == HEARTBEATS_A_LEASE:
                    raise

    async def _deregister(self, router: str) -> None:
        stub = registry_pb2_grpc.RegistryStub(self._channels[router])
        try:
            await stub.Deregister(registry_pb2.DeregisterRequest(lease_id=self._leases[router]), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            structlog.get_logger().info("could not deregister", router=router, detail=error.details())
