"""`dsv4-pd doctor`: what this host can do, what is missing and how to get it, and a transfer to itself."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from common.transfer.digest import digest_of
from common.transfer.engine import EngineSettings, TransferEngine, TransferUnavailableError
from common.transfer.rdma import RdmaDevice, RdmaError, check_memlock, find_devices

LOOPBACK_BYTES = 64 << 20
LOOPBACK_TIMEOUT_S = 20.0
PACKAGES = ("torch", "grpcio", "cupy-cuda12x", "cupy-cuda13x", "triton")
MOONCAKES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
LEAST_FILES = 4096


@dataclass(frozen=True)
class Finding:
    """state: "bad" keeps the services from working, "note" is worth knowing."""

    what: str
    state: Literal["ok", "note", "bad"]
    detail: str


def examine() -> list[Finding]:
    """Every check, in the order of printing."""
    devices = find_devices()
    return [
        *versions(),
        processor(),
        *gpus(),
        *rdma(devices),
        memlock(bool(devices)),
        open_files(),
        transports(devices),
        loopback(lambda: TransferEngine(EngineSettings())),
    ]


def versions() -> list[Finding]:
    found = [Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")]
    for name in PACKAGES:
        version = _version(name)
        if version:
            found.append(Finding(name, "ok", version))
    mooncakes = [f"{name} {version}" for name in MOONCAKES if (version := _version(name))]
    if len(mooncakes) == 1:
        found.append(Finding("mooncake", "ok", mooncakes[0]))
    else:
        have = ", ".join(mooncakes) or "none"
        found.append(
            Finding("mooncake", "bad", f"exactly one wheel must be installed (they overwrite each other): {have}")
        )
    return found


def processor() -> Finding:
    nodes = (
        len([name for name in os.listdir("/sys/devices/system/node") if name.startswith("node")])
        if os.path.isdir("/sys/devices/system/node")
        else 1
    )
    return Finding("cpu", "ok", f"{len(os.sched_getaffinity(0))} usable cores, {nodes} NUMA node(s)")


def gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        return [Finding("gpu", "note", "no CUDA device that torch can use: the cpu backend serves")]
    return [
        Finding("gpu", "ok", f"{index}: {torch.cuda.get_device_name(index)}, "
                f"{torch.cuda.get_device_properties(index).total_memory >> 20} MiB")
        for index in range(torch.cuda.device_count())
    ]  # fmt: skip


def rdma(devices: tuple[RdmaDevice, ...]) -> list[Finding]:
    if not devices:
        return [Finding("rdma", "note", "no device in /sys/class/infiniband: only TCP")]
    found: list[Finding] = []
    for device in devices:
        ports = "; ".join(
            f"port {port.number} {port.state}, {port.link_layer}, {port.rate}, GIDs "
            f"{', '.join(f'{index}={address}' for index, address in port.gids) or 'none'}"
            for port in device.ports
        )
        active = any(port.active for port in device.ports)
        detail = f"{device.name}, NUMA node {device.numa_node}: {ports or 'no ports'}"
        found.append(Finding("rdma", "ok" if active else "note", detail))
    return found


def memlock(needed: bool) -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    try:
        check_memlock(1 << 40)
    except RdmaError as error:
        # Pools are as large as memory; anything short of unlimited will be too little one day.
        return Finding(
            "memlock", "bad" if needed else "note", f"{text}; {error}" if needed else f"{text}; RDMA would need more"
        )
    return Finding("memlock", "ok", text)


def open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < LEAST_FILES:
        return Finding(
            "open files", "note", f"{limit}: each stream is one; `ulimit -n {LEAST_FILES}` or more is better"
        )
    return Finding("open files", "ok", str(limit))


def transports(devices: tuple[RdmaDevice, ...]) -> Finding:
    active = any(port.active for device in devices for port in device.ports)
    names = "tcp, rdma (this project has not been run on RDMA hardware)" if active else "tcp"
    return Finding("transports", "ok", names)


def loopback(make_engine: Callable[[], TransferEngine]) -> Finding:
    """Writes from one Mooncake engine of this process to another and compares digests."""
    source = torch.randint(0, 256, (LOOPBACK_BYTES,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    try:
        sender, receiver = make_engine(), make_engine()
        sender.register(source.data_ptr(), source.nbytes)
        receiver.register(target.data_ptr(), target.nbytes)
    except TransferUnavailableError as error:
        return Finding("loopback", "bad", str(error))
    begun = time.perf_counter()
    state = "running"
    transfer = sender.submit_write(receiver.session, source.data_ptr(), target.data_ptr(), source.nbytes)
    if transfer == 0:
        state = "failed"
    while state == "running" and time.perf_counter() - begun < LOOPBACK_TIMEOUT_S:
        state = sender.check(transfer)
        time.sleep(0.0005)
    seconds = time.perf_counter() - begun
    if state != "done":
        return Finding(
            "loopback",
            "bad",
            f"a write to {receiver.session} is {state} after {seconds:.1f} s; is a firewall in the way?",
        )
    digests = [digest_of([(memory.data_ptr(), memory.nbytes)]) for memory in (source, target)]
    receiver.fence(5.0)
    sender.close()
    if digests[0] != digests[1]:
        return Finding("loopback", "bad", "other bytes landed than were sent")
    rate = LOOPBACK_BYTES / seconds / 1e9
    return Finding(
        "loopback",
        "ok",
        f"{LOOPBACK_BYTES >> 20} MiB over TCP in {seconds * 1e3:.0f} ms, {rate:.1f} GB/s, digests equal",
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
