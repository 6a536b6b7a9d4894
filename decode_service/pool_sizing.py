"""What the pools of this service are to be, from its settings and the memory that is free, and whether the host's
limits allow it: all before anything is allocated or page-locked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from common.kernels.backend import Backend
from common.kv.footprint import Footprint
from common.kv.layout import LOGICAL_PAGE_TOKENS, logical_page_count
from common.kv.sizing import (
    CPU_RESERVE_BYTES,
    DEFAULT_PAGES,
    DEFAULT_REQUESTS,
    DEFAULT_RESIDENT_PAGES,
    DEVICE_RESERVE_BYTES,
    HOST_RESERVE_BYTES,
    Budget,
    Counts,
    PoolSizes,
    free_budget,
    lengths_up_to,
    size_pools,
)
from common.memory_limits import MemoryLimit, available_memory, cgroup_limits, check_memory, tightest
from common.model.config import ModelConfig
from common.quantities import parse_bytes, show_bytes
from common.transfer.rdma import check_memlock
from decode_service.settings import AUTO, DecodeSettings

_MUCH = 1 << 60


@dataclass(frozen=True)
class FreeMemory:
    """machine: all of the host; cgroups: the limits that hold for this process; device: of the GPU, None where the
    device's memory is the host's."""

    machine: MemoryLimit
    cgroups: tuple[MemoryLimit, ...]
    device: MemoryLimit | None

    @classmethod
    def read(cls, backend: Backend) -> FreeMemory:
        """As it is now: call it when the weights are loaded. Raises ValueError."""
        device = None
        if not backend.on_host:
            torch.cuda.empty_cache()
            left, total = torch.cuda.mem_get_info(backend.device)
            device = MemoryLimit(f"memory of {backend.device}", total, total - left)
        return cls(available_memory(), cgroup_limits(), device)

    @property
    def host(self) -> MemoryLimit:
        """The limit of the host's memory that leaves least."""
        return tightest((self.machine, *self.cgroups))


UNLIMITED = FreeMemory(MemoryLimit("no limit", _MUCH, 0), (), None)


def pool_sizes(settings: DecodeSettings, config: ModelConfig, footprint: Footprint, memory: FreeMemory) -> PoolSizes:
    """Counts that are set are taken; the budgets give the others. Raises SizingError."""
    staging = settings.staging_pages if settings.admission == "staged" else 0
    given = Counts(
        settings.host_pages or 0, settings.logical_pages or 0, settings.max_requests or 0, staging,
        settings.resident_pages,
    )  # fmt: skip
    tokens = min(settings.max_context_tokens or LOGICAL_PAGE_TOKENS, config.max_positions)
    # Without a GPU both budgets are of the same memory, which the machine's other processes use too.
    share, most, reserve = 2, max(DEFAULT_PAGES, logical_page_count(tokens)), CPU_RESERVE_BYTES
    if memory.device is not None:
        share, reserve = 1, HOST_RESERVE_BYTES
        longest = min(config.max_positions, settings.max_context_tokens or config.max_positions)
        most = (given.requests or DEFAULT_REQUESTS) * logical_page_count(longest)
    device = _budget(
        "device_kv_budget", settings.device_kv_budget, memory.device or memory.host,
        DEVICE_RESERVE_BYTES if memory.device is not None else reserve, share, most,
        bool(given.logical_pages and given.requests),
        DEFAULT_RESIDENT_PAGES if memory.device is None else 0,
    )  # fmt: skip
    host = _budget("host_kv_budget", settings.host_kv_budget, memory.host, reserve, share, most, bool(given.host_pages))
    return size_pools(footprint, host, device, given, tokens, memory.device is not None)


def check_limits(settings: DecodeSettings, footprint: Footprint, sizes: PoolSizes, memory: FreeMemory) -> None:
    """Raises MemoryLimitError or RdmaError, which name the limit, its value and the bytes needed. Pages that are locked
    must also be free; others come from the machine's memory as they are first written."""
    on_host = sizes.host_bytes
    if memory.device is None:
        on_host += sizes.device_bytes
    limits = memory.cgroups if memory.device is None else (memory.machine, *memory.cgroups)
    check_memory(on_host, "the KV pools" if memory.device is None else "the page-locked host pool", limits)
    if settings.transfer_protocol == "rdma":
        check_memlock(registered_bytes(footprint, sizes, memory.device is None))


def registered_bytes(footprint: Footprint, sizes: PoolSizes, on_host: bool) -> int:
    """Bytes of the host's memory that the transport registers: what prefill writes. `on_host`: whether the device's
    memory is the host's."""
    landing = 0 if sizes.staging_pages else sizes.host_pages * footprint.host_page
    if on_host:
        landing += sizes.staging_pages * footprint.host_page + sizes.logical_pages * footprint.logical_page
        landing += sizes.requests * footprint.window_slot + (sizes.requests + 1) * footprint.state_slot
    return landing


def describe(sizes: PoolSizes, longest: int) -> dict[str, Any]:
    """For the log: sizes, and for some lengths up to `longest` tokens how many requests each pool holds and all do."""
    return {
        "host_pages": sizes.host_pages,
        "logical_pages": sizes.logical_pages,
        "max_requests": sizes.requests,
        "staging_pages": sizes.staging_pages,
        "resident_pages": sizes.resident_pages,
        "host": show_bytes(sizes.host_bytes),
        "device": show_bytes(sizes.device_bytes),
        "fits": [
            {"tokens": tokens, "requests": sizes.most_requests(tokens), **sizes.fits(tokens)}
            for tokens in lengths_up_to(longest)
        ],
    }


def _budget(
    name: str, text: str, limit: MemoryLimit, most_reserve: int, share: int, most_pages: int, needless: bool,
    most_resident: int = 0,
) -> Budget:  # fmt: skip
    """`needless`: every count that it would give is given, so that "auto" has nothing to say."""
    if text != AUTO:
        return Budget(parse_bytes(text), name)
    if needless:
        return Budget(_MUCH, name, most_resident=DEFAULT_RESIDENT_PAGES)
    size = free_budget(limit.total, limit.left, most_reserve, share)
    source = (
        f"{name} (auto: {limit.name} is {show_bytes(limit.total)}, {show_bytes(limit.left)} of it free, less a reserve)"
    )
    return Budget(size, source, most_pages, most_resident)
