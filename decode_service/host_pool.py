"""The host pool: the C4 rows of every request, one contiguous buffer a layer, in pages of 64 entries.

One page id holds for all layers. Entry e of a request is at row pages[e // 64] * 64 + e % 64. Prefill services
write straight into these buffers, which are registered once.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels.interface import KVKernels
from common.kv.layout import C4_PAGE
from decode_service.extent_allocator import ExtentAllocator


@dataclass(frozen=True)
class BufferInfo:
    """For transfer: item i of a layer's buffer begins at address + i * item_bytes."""

    layer: int
    address: int
    size: int
    item_bytes: int


class DeepSeekV4PagedHostPool:
    """buffers[layer] is [pages, 37440] uint8."""

    def __init__(
        self, layers: Sequence[int], pages: int, kernels: KVKernels, shuffle_seed: int | None = None,
        page_locked: bool = False,
    ) -> None:  # fmt: skip
        """`page_locked`: memory that a GPU reads and writes in place; raises RuntimeError where it can't be had."""
        self.allocator = ExtentAllocator("host_c4", pages, shuffle_seed)
        try:
            self.buffers: dict[int, Tensor] = {
                layer: torch.zeros(pages, C4_PAGE.page_bytes, dtype=torch.uint8, pin_memory=page_locked)
                for layer in layers
            }
        except RuntimeError as error:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            raise RuntimeError(
                f"{pages} host pages ({pages * C4_PAGE.page_bytes * len(layers)} bytes) can't be "
                f"{'page-locked' if page_locked else 'had'} ({error}); the memlock limit is "
                f"{'unlimited' if limit == resource.RLIM_INFINITY else limit}"
            ) from error
        self._kernels = kernels

    @property
    def page_bytes(self) -> int:
        """Bytes of one page id over all layers."""
        return C4_PAGE.page_bytes * len(self.buffers)

    def get_contiguous_buf_infos(self) -> list[BufferInfo]:
        return [
            BufferInfo(layer, buffer.data_ptr(), buffer.nbytes, C4_PAGE.page_bytes)
            for layer, buffer in self.buffers.items()
        ]

    def load_rows(self, layer: int, host_rows: Tensor | None, device_pages: Tensor, device_rows: Tensor | None) -> None:
        """Copies rows of a layer to device pages; both row lists [n] int64, or neither. Raises ValueError."""
        pair = self.check_rows(host_rows, device_rows)
        if pair is not None:
            self._kernels.transfer_rows(self.buffers[layer], pair[0], device_pages, pair[1], C4_PAGE, C4_PAGE)

    def backup_rows(
        self, layer: int, host_rows: Tensor | None, device_pages: Tensor, device_rows: Tensor | None
    ) -> None:
        """Copies rows of device pages to rows of a layer, row by row: n rows are no page. Raises ValueError."""
        pair = self.check_rows(host_rows, device_rows)
        if pair is not None:
            self._kernels.transfer_rows(device_pages, pair[1], self.buffers[layer], pair[0], C4_PAGE, C4_PAGE)

    def check_rows(self, host_rows: Tensor | None, device_rows: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """The one check of index arguments: both or neither, equally long, host rows inside the pool. (The
        kernels check the device side.) Raises ValueError that says which."""
        if (host_rows is None) != (device_rows is None):
            given, missing = ("host", "device") if device_rows is None else ("device", "host")
            raise ValueError(f"{given} rows are given but {missing} rows are not")
        if host_rows is None or device_rows is None:
            return None
        if host_rows.shape != device_rows.shape:
            raise ValueError(f"{host_rows.shape[0]} host rows but {device_rows.shape[0]} device rows")
        rows = self.allocator.total * C4_PAGE.rows
        if host_rows.numel() and (int(host_rows.min()) < 0 or int(host_rows.max()) >= rows):
            bad = int(host_rows.min()) if int(host_rows.min()) < 0 else int(host_rows.max())
            raise ValueError(f"host row {bad} is not in [0, {rows})")
        return host_rows, device_rows
