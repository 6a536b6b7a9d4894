"""Mooncake's transfer engine behind what this project needs of it: register memory, write, check, close.

Mooncake reads its settings from the environment once, at import, so it is imported here and nowhere else. It has
no authentication: whoever reaches its ports can write registered memory, so they belong on a private network.
"""

from __future__ import annotations

import bisect
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import structlog

from common.transfer.rdma import RdmaError, check_memlock, choose_devices, find_devices

FENCE_POLL_S = 0.002
_APT_PACKAGES = "libibverbs1 librdmacm1 libnuma1 libcurl4"
_starting = threading.Lock()


class TransferUnavailableError(RuntimeError):
    """Mooncake can't be imported, started or given memory; the message says what to do."""


@dataclass(frozen=True)
class EngineSettings:
    """hostname: the address under which peers reach this process; device: RDMA device names, "" = all;
    min_port, max_port: range of the two ports an engine opens (0 = Mooncake's own, 15000 to 17000);
    gid_index, ib_port: of RDMA devices (-1 and 0 = Mooncake's choice); numa_node: use RDMA devices of that node only
    (-1 = any); register_bytes: memory is registered in pieces of at most so many bytes."""

    hostname: str = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    min_port: int = 0
    max_port: int = 0
    transfer_timeout_s: int = 30
    progress_timeout_s: int = 5
    gid_index: int = -1
    ib_port: int = 0
    numa_node: int = -1
    register_bytes: int = 1 << 30


def _environment(settings: EngineSettings) -> dict[str, str]:
    chosen = {
        # The protocol argument of Mooncake is advice only; these force it.
        ("MC_FORCE_TCP" if settings.protocol == "tcp" else "MC_FORCE_HCA"): "1",
        "MC_LOG_LEVEL": "ERROR",
        # Without the pool every transfer opens a connection and ports run out.
        "MC_TCP_ENABLE_CONNECTION_POOL": "true",
        # Beyond the defaults of 2 048 outstanding blocks version 0.3.13 wedges a peer for good.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
        "MC_TRANSFER_TIMEOUT": str(settings.transfer_timeout_s),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(settings.progress_timeout_s),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(settings.progress_timeout_s),
    }
    if settings.min_port:
        chosen["MC_MIN_RPC_PORT"] = str(settings.min_port)
        chosen["MC_MAX_RPC_PORT"] = str(settings.max_port)
    if settings.gid_index >= 0:
        chosen["MC_GID_INDEX"] = str(settings.gid_index)
    if settings.ib_port:
        chosen["MC_IB_PORT"] = str(settings.ib_port)
    return chosen


class TransferEngine:
    """One Mooncake engine. Not to be used in a forked child. `session` is what peers write to."""

    def __init__(self, settings: EngineSettings) -> None:
        """Raises TransferUnavailableError."""
        device = settings.device
        if settings.protocol == "rdma":
            try:
                device = choose_devices(
                    settings.device, settings.numa_node, settings.ib_port, settings.gid_index, find_devices()
                )
            except RdmaError as error:
                raise TransferUnavailableError(str(error)) from None
        for name, value in _environment(settings).items():
            os.environ.setdefault(name, value)
        try:
            from mooncake.engine import TransferEngine as Mooncake  # type: ignore[import-not-found]
        except ImportError as error:
            raise TransferUnavailableError(
                f"mooncake can't be imported ({error}); install exactly one of the mooncake-transfer-engine wheels "
                f"and, on Debian, apt-get install {_APT_PACKAGES}"
            ) from None
        self._protocol = settings.protocol
        self._register_bytes = settings.register_bytes
        self._locked_bytes = 0
        self._engine: Any = Mooncake()
        # Mooncake does not say on which port it takes data: it is what listens now and did not before.
        with _starting:
            before = _listening()
            status = self._engine.initialize(settings.hostname, "P2PHANDSHAKE", settings.protocol, device)
            self._ports = frozenset(_listening() - before)
        if status != 0:
            raise TransferUnavailableError(
                f"mooncake did not start: initialize({settings.hostname!r}, {settings.protocol!r}) gave {status}"
            )
        self.session = f"{settings.hostname}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._pieces: dict[int, int] = {}
        self._registered: list[int] = []
        self._closed = False
        structlog.get_logger().info("transfer engine started", session=self.session, protocol=settings.protocol)

    def register(self, address: int, size: int, piece_bytes: int = 0) -> None:
        """Makes memory readable and writable for transfers, in pieces of `piece_bytes` (0 = the setting's). No write
        may cross the border of two, on either side. Raises TransferUnavailableError."""
        piece_bytes = piece_bytes or self._register_bytes
        self._locked_bytes += size
        if self._protocol == "rdma":
            try:
                check_memlock(self._locked_bytes)
            except RdmaError as error:
                raise TransferUnavailableError(str(error)) from None
        for begin in range(0, size, piece_bytes):
            length = min(piece_bytes, size - begin)
            status = self._engine.register_memory(address + begin, length)
            if status != 0:
                raise TransferUnavailableError(
                    f"mooncake refused to register {length} bytes at {address + begin:#x} ({status})"
                )
            with self._lock:
                self._registered.append(address + begin)
        with self._lock:
            bisect.insort(self._starts, address)
            self._ends[address] = address + size
            self._pieces[address] = piece_bytes

    def local_pieces(self, address: int, size: int) -> list[int]:
        """How `size` bytes from `address` on lie in registered pieces: sizes, in order. Raises ValueError unless they
        lie inside one registered region: Mooncake over TCP doesn't check."""
        with self._lock:
            place = bisect.bisect_right(self._starts, address) - 1
            start = self._starts[place] if place >= 0 else 0
            inside = place >= 0 and address + size <= self._ends[start]
            piece = self._pieces[start] if inside else 0
        if not inside:
            raise ValueError(f"{size} bytes at {address:#x} are not inside registered memory")
        sizes: list[int] = []
        while size > 0:
            sizes.append(min(size, piece - (address - start) % piece))
            address += sizes[-1]
            size -= sizes[-1]
        return sizes

    def submit_write(self, session: str, source: int, target: int, size: int) -> int:
        """Begins one write; returns its id, 0 when it was refused (then nothing is in flight)."""
        return int(self._engine.transfer_submit_write(session, source, target, size))

    def check(self, transfer: int) -> Literal["done", "failed", "running"]:
        """State of a write; a "done" or "failed" one must not be asked about again."""
        status = int(self._engine.transfer_check_status(transfer))
        if status == 1:
            return "done"
        # -2 says that a time limit passed; the write is still alive.
        return "failed" if status == -1 else "running"

    def fence(self, timeout_s: float) -> bool:
        """Ends the session for good; True when not one byte of its writers can land any more. Idempotent.

        Unregistering is not enough: a write whose header was taken goes on to its end afterwards, hours later if
        its sender was stopped in between. Over TCP the connections are shut down and waited for; one that comes
        later finds nothing registered. The engine stays, so that no other session gets its ports. Over RDMA the
        engine is destroyed, and its queue pairs with it, which holds the interpreter for up to a second.
        """
        self.close()
        if self._protocol == "rdma":
            self._engine = None
            return True
        end = time.monotonic() + timeout_s
        while self._shut_down_connections():
            if time.monotonic() > end:
                return False
            time.sleep(FENCE_POLL_S)
        return True

    def _shut_down_connections(self) -> int:
        """Shuts down what is connected to this engine; returns how many connections there are."""
        found = 0
        for connection in psutil.Process().net_connections("tcp"):
            local = connection.laddr.port if connection.laddr else 0
            if local not in self._ports or connection.status == psutil.CONN_LISTEN or connection.fd < 0:
                continue
            found += 1
            try:
                copy = socket.socket(fileno=os.dup(connection.fd))
            except OSError:
                continue
            with copy:
                # The number may belong to another connection by now.
                try:
                    if copy.getsockname()[1] in self._ports:
                        copy.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
        return found

    def close(self) -> None:
        """Unregisters everything: no new write into this process's memory begins afterwards. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            registered, self._registered = self._registered, []
        for address in registered:
            self._engine.unregister_memory(address)


def _listening() -> set[int]:
    """TCP ports on which this process listens."""
    return {
        connection.laddr.port
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
