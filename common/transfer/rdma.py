"""What this host has for RDMA, read from sysfs: devices with their ports, addresses and NUMA nodes, and limits.

NOT RUN ON RDMA HARDWARE: written from the kernel's sysfs documentation and tested against made-up trees.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/class/infiniband")
UNSET_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


class RdmaError(RuntimeError):
    """RDMA can't be used as it is set; the message says what to do."""


@dataclass(frozen=True)
class RdmaPort:
    """gids: (index, address) of those that are set."""

    number: int
    state: str
    link_layer: str
    rate: str
    gids: tuple[tuple[int, str], ...]

    @property
    def active(self) -> bool:
        return self.state.upper().endswith("ACTIVE")


@dataclass(frozen=True)
class RdmaDevice:
    """numa_node is -1 where the kernel doesn't know."""

    name: str
    numa_node: int
    ports: tuple[RdmaPort, ...]


def find_devices(root: Path = SYSFS) -> tuple[RdmaDevice, ...]:
    """All of this host, by name; none where there is no RDMA."""
    if not root.is_dir():
        return ()
    return tuple(
        RdmaDevice(folder.name, int(_read(folder / "device" / "numa_node") or -1), _ports(folder / "ports"))
        for folder in sorted(root.iterdir())
    )


def choose_devices(wanted: str, numa_node: int, port: int, gid_index: int, devices: Sequence[RdmaDevice]) -> str:
    """Device names, comma separated, for Mooncake: `wanted` ones (comma separated, "" = all) on `numa_node` (-1 =
    any), with `port` (0 = any) active and GID `gid_index` (-1 = Mooncake's choice) set.

    Raises RdmaError that names what is there.
    """
    if not devices:
        raise RdmaError(f"this host has no RDMA device in {SYSFS}; load the driver or set transfer_protocol = tcp")
    there = ", ".join(f"{device.name} (NUMA node {device.numa_node})" for device in devices)
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        if name not in {device.name for device in devices}:
            raise RdmaError(f"transfer_device {name!r} is not on this host; it has {there}")
    chosen = [device for device in devices if not names or device.name in names]
    if numa_node >= 0:
        chosen = [device for device in chosen if device.numa_node == numa_node]
    chosen = [device for device in chosen if any(_usable(each, port, gid_index) for each in device.ports)]
    if not chosen:
        raise RdmaError(
            f"no RDMA device fits transfer_device = {wanted!r}, transfer_numa_node = {numa_node}, transfer_ib_port = "
            f"{port}, transfer_gid_index = {gid_index} with an active port; this host has {there}"
        )
    return ",".join(device.name for device in chosen)


def check_memlock(needed: int, limit: int | None = None) -> None:
    """Raises RdmaError that names the fix unless `needed` bytes may be locked. `limit`: default, this process's."""
    allowed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise RdmaError(
            f"RDMA locks {needed} bytes, this process may lock {allowed}: set `ulimit -l unlimited`, "
            "LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (docker), or the memlock lines of limits.conf"
        )


def _usable(port: RdmaPort, number: int, gid_index: int) -> bool:
    has_gid = gid_index < 0 or any(index == gid_index for index, _ in port.gids)
    return port.active and number in (0, port.number) and has_gid


def _ports(folder: Path) -> tuple[RdmaPort, ...]:
    if not folder.is_dir():
        return ()
    return tuple(
        RdmaPort(
            int(port.name),
            _read(port / "state"),
            _read(port / "link_layer"),
            _read(port / "rate"),
            tuple(
                (int(gid.name), address)
                for gid in sorted((port / "gids").glob("*"), key=lambda path: int(path.name))
                if (address := _read(gid)) not in ("", UNSET_GID)
            ),
        )
        for port in sorted(folder.iterdir(), key=lambda path: int(path.name))
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
