"""Device-side pools: index keys and C128 rows by logical page, window pages and compressor
states by slot. All are registered, since prefill writes into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.kv.layout import (
    C128_PAGE,
    INDEX_PAGE,
    STATE_C4_ROWS,
    STATE_C4_WIDTH,
    STATE_C128_ROWS,
    STATE_C128_WIDTH,
    STATE_INDEX_ROWS,
    STATE_INDEX_WIDTH,
    WINDOW_PAGE,
)
from common.model.config import ModelConfig
from common.model.kv_store import CacheKind
from common.transfer.ticket import ITEM_BYTES, Region, RegionKind, RegionTable
from decode_service.extent_allocator import ExtentAllocator
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.page_allocator import PageAllocator
from decode_service.staging import StagingPool

CPU = torch.device("cpu")
_STATE_KINDS = {
    CacheKind.C4: RegionKind.STATE_C4,
    CacheKind.INDEX: RegionKind.STATE_INDEX,
    CacheKind.C128: RegionKind.STATE_C128,
}


@dataclass(frozen=True)
class DevicePools:
    """index[layer] [logical pages, 8448] and c128[layer] [logical pages, 1728] uint8; window[layer]
    [slots, 149760] uint8; states[layer, kind] [slots + 1, rows, width] fp32, row of token t is t % rows; the last
    slot belongs to nobody and takes what the padding of a captured step writes."""

    logical: ExtentAllocator
    window_slots: PageAllocator
    state_slots: PageAllocator
    index: dict[int, Tensor]
    c128: dict[int, Tensor]
    window: dict[int, Tensor]
    states: dict[tuple[int, CacheKind], Tensor]

    @classmethod
    def of(
        cls, config: ModelConfig, logical_pages: int, slots: int, shuffle_seed: int | None = None,
        device: torch.device = CPU,
    ) -> DevicePools:  # fmt: skip
        c4, c128 = config.layers_of(4), config.layers_of(128)
        states = {
            (layer, CacheKind.C4): torch.zeros(slots + 1, STATE_C4_ROWS, STATE_C4_WIDTH, device=device) for layer in c4
        }
        states |= {
            (layer, CacheKind.INDEX): torch.zeros(slots + 1, STATE_INDEX_ROWS, STATE_INDEX_WIDTH, device=device)
            for layer in c4
        }
        states |= {
            (layer, CacheKind.C128): torch.zeros(slots + 1, STATE_C128_ROWS, STATE_C128_WIDTH, device=device)
            for layer in c128
        }
        return cls(
            logical=ExtentAllocator("logical", logical_pages, shuffle_seed),
            window_slots=PageAllocator("window", slots, shuffle_seed),
            state_slots=PageAllocator("state", slots, shuffle_seed),
            index={layer: _pages(logical_pages, INDEX_PAGE.page_bytes, device) for layer in c4},
            c128={layer: _pages(logical_pages, C128_PAGE.page_bytes, device) for layer in c128},
            window={layer: _pages(slots, WINDOW_PAGE.page_bytes, device) for layer in range(config.num_layers)},
            states=states,
        )

    def clear_state(self, slot: int) -> None:
        """No token seen yet: values 0, gates -inf. Before anyone may write the slot."""
        for state in self.states.values():
            half = state.shape[2] // 2
            state[slot, :, :half] = 0
            state[slot, :, half:] = float("-inf")

    @property
    def scratch_slot(self) -> int:
        """The state slot of padding rows."""
        return self.state_slots.total

    @property
    def where(self) -> torch.device:
        return next(iter(self.window.values())).device

    def buffers(self) -> list[Tensor]:
        """Every buffer on the device that a handover writes."""
        return [*self.index.values(), *self.c128.values(), *self.window.values(), *self.states.values()]

    def regions(self, host: DeepSeekV4PagedHostPool, staging: StagingPool | None = None) -> RegionTable:
        """Every buffer that a handover writes; C4 pages go to the staging pool if there is one, else to the host."""
        if staging is not None:
            found = staging.regions()
        else:
            found = [Region(info.layer, RegionKind.C4, info.address, info.size, info.item_bytes)
                     for info in host.get_contiguous_buf_infos()]  # fmt: skip
        for kind, buffers in (
            (RegionKind.INDEX, self.index),
            (RegionKind.C128, self.c128),
            (RegionKind.WINDOW, self.window),
        ):
            found += [_region(layer, kind, buffer) for layer, buffer in buffers.items()]
        found += [_region(layer, _STATE_KINDS[kind], state) for (layer, kind), state in self.states.items()]
        return RegionTable(found)


def _pages(count: int, page_bytes: int, device: torch.device) -> Tensor:
    return torch.zeros(count, page_bytes, dtype=torch.uint8, device=device)


def _region(layer: int, kind: RegionKind, buffer: Tensor) -> Region:
    return Region(layer, kind, buffer.data_ptr(), buffer.nbytes, ITEM_BYTES[kind])
