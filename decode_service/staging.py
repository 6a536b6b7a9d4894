"""Staged admission: C4 pages land in device pages first and are copied to the host pool before decoding begins.

The other way, direct admission, lets them land in the host pool at once: no second copy, no second pool. Staging is
what a system has whose transport can only reach device memory; here it is kept to be measured against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.kernels.interface import KVKernels
from common.kv.layout import C4_PAGE
from common.transfer.ticket import Region, RegionKind
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.page_allocator import PageAllocator

CPU = torch.device("cpu")


class StagingPool:
    """buffers[layer] is [pages, 37440] uint8 on the device; one page id holds for all layers."""

    def __init__(
        self,
        layers: Sequence[int],
        pages: int,
        kernels: KVKernels,
        shuffle_seed: int | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.allocator = PageAllocator("staging", pages, shuffle_seed)
        self.buffers: dict[int, Tensor] = {
            layer: torch.zeros(pages, C4_PAGE.page_bytes, dtype=torch.uint8, device=device) for layer in layers
        }
        self._kernels = kernels
        self._device = device

    @property
    def page_bytes(self) -> int:
        """Bytes of one page id over all layers."""
        return C4_PAGE.page_bytes * len(self.buffers)

    def regions(self) -> list[Region]:
        """Where C4 pages land instead of in the host pool."""
        return [
            Region(layer, RegionKind.C4, buffer.data_ptr(), buffer.nbytes, C4_PAGE.page_bytes)
            for layer, buffer in self.buffers.items()
        ]

    def copy_to_host(
        self, host: DeepSeekV4PagedHostPool, staging_pages: Sequence[int], host_pages: Sequence[int], entries: int
    ) -> None:
        """Copies `entries` rows of a request from its staging pages to its host pages, in every layer, and waits for
        the copies: the staging pages may be written again afterwards.

        Raises ValueError when the pages don't hold so many.
        """
        if entries > C4_PAGE.rows * min(len(staging_pages), len(host_pages)):
            raise ValueError(
                f"{entries} entries do not fit {len(staging_pages)} staging and {len(host_pages)} host pages"
            )
        entry = torch.arange(entries, device=self._device)
        source = self._ids(staging_pages)[entry // C4_PAGE.rows] * C4_PAGE.rows
        target = self._ids(host_pages)[entry // C4_PAGE.rows] * C4_PAGE.rows
        for layer, buffer in self.buffers.items():
            host.backup_rows(layer, target + entry % C4_PAGE.rows, buffer, source + entry % C4_PAGE.rows)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _ids(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._device)
