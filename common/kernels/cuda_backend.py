"""The cuda backend: KVKernels by the kernels in cuda/*.cu, byte for byte what the cpu backend does.

A launch never waits for the device. Wrong indices and values that aren't finite are found there: the kernel leaves
the row out and keeps the first fault, which `check_faults` raises. With strict=True (tests, debugging) every
operation also checks its indices first, as the cpu backend does, and raises at once; both wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.kernels import swap_in_cpu
from common.kernels.cuda_arguments import check_list, check_pages, check_swap_in, check_values, rows_log2
from common.kernels.cuda_launch import CupyLauncher, Launcher
from common.kernels.interface import HostRows, HotState
from common.kernels.page_views import check_places
from common.kv.layout import C4_PAGE, INDEX_PAGE, INDEX_VALUES, ROW_VALUES, PageLayout

# Batches up to this size resolve and copy in two launches: one block a row can't keep PCIe busy.
SPLIT_UP_TO = 8
# Selected entries of a batch that is split, at most; more are swapped in by one launch.
SPLIT_ENTRIES = SPLIT_UP_TO * 2048
_WARPS = 8
_MOST_ADDRESS_LISTS = 256
_FAULTS = {
    1: "source row {1} (place {0} of the list) is not in [0, {2})",
    2: "target row {1} (place {0} of the list) is not in [0, {2})",
    3: "row {0} of {2} holds NaN or infinity",
    4: "swap_in: slot {1} of batch row {0} is not in [-1, {2})",
    5: "swap_in: batch row {0} selects entries outside [-1, {2}): {1}",
    6: "swap_in: batch row {0} needs host page {1}, which is not in [0, {2})",
    7: "swap_in: the hot buffer of batch row {0} is corrupt: row {1} of {2}",
}


class CudaKernels:
    """Every operation of KVKernels, and `transfer_layers`, on the launcher's device. One per engine thread."""

    def __init__(self, launcher: Launcher, *, strict: bool = False, split_up_to: int = SPLIT_UP_TO) -> None:
        self._launcher = launcher
        self._strict = strict
        self._split_up_to = split_up_to
        self._fault = torch.zeros(4, dtype=torch.int64, device=launcher.device)
        # Of the split swap-in: pairs in the list, and blocks that are done with it.
        self._list_size = torch.zeros(2, dtype=torch.int64, device=launcher.device)
        # Allocated once: a captured graph keeps its address.
        self._list = torch.empty(2 * SPLIT_ENTRIES, dtype=torch.int64, device=launcher.device)
        self._addresses: dict[tuple[int, ...], Tensor] = {}

    def check_faults(self) -> None:
        """Waits for the device; raises ValueError for the first fault since the last call."""
        code, place, value, bound = self._fault.tolist()
        if code:
            self._fault.zero_()
            raise ValueError(_FAULTS[code].format(place, value, bound))

    def pack_rows(self, rows: Tensor, pages: Tensor, places: Tensor, layout: PageLayout) -> None:
        """See KVKernels.pack_rows; rows fp32 or bf16."""
        self._pack("pack_rows", "rows", rows, ROW_VALUES, pages, places, layout)

    def pack_index_keys(self, keys: Tensor, pages: Tensor, places: Tensor) -> None:
        """See KVKernels.pack_index_keys; keys fp32 or bf16."""
        self._pack("pack_index_keys", "keys", keys, INDEX_VALUES, pages, places, INDEX_PAGE)

    def _pack(
        self, kernel: str, what: str, values: Tensor, width: int, pages: Tensor, places: Tensor, layout: PageLayout
    ) -> None:
        check_values(values, width, self._launcher, f"{kernel}: {what}")
        self._check_places(places, pages, layout, kernel, least=-1)
        count = places.shape[0]
        if values.shape[0] != count:
            raise ValueError(f"{values.shape[0]} {what} but {count} places")
        is_bf16 = int(values.dtype == torch.bfloat16)
        self._launch(
            "pack", kernel, self._warp_grid(count),
            [values.data_ptr(), is_bf16, count, places.data_ptr(), *_pages(pages, layout)],
        )  # fmt: skip

    def unpack_rows(self, pages: Tensor, places: Tensor, layout: PageLayout) -> Tensor:
        """See KVKernels.unpack_rows."""
        self._check_places(places, pages, layout, "unpack_rows", least=-1)
        count = places.shape[0]
        out = torch.empty(count, ROW_VALUES, device=self._launcher.device)
        self._launch(
            "unpack", "unpack_rows", self._warp_grid(count),
            [*_pages(pages, layout), places.data_ptr(), count, out.data_ptr()],
        )  # fmt: skip
        return out

    def unpack_index_pages(self, pages: Tensor, page_ids: Tensor) -> Tensor:
        """See KVKernels.unpack_index_pages."""
        check_list(page_ids, torch.int64, 1, self._launcher, "unpack_index_pages: page ids")
        self._check_places(page_ids * INDEX_PAGE.rows, pages, INDEX_PAGE, "unpack_index_pages")
        count = page_ids.shape[0]
        out = torch.empty(count * INDEX_PAGE.rows, INDEX_VALUES, device=self._launcher.device)
        self._launch(
            "unpack", "unpack_index_pages", self._warp_grid(count * INDEX_PAGE.rows),
            [*_pages(pages, INDEX_PAGE), page_ids.data_ptr(), count, out.data_ptr()],
        )  # fmt: skip
        return out

    def transfer_rows(
        self,
        source: Tensor,
        source_places: Tensor,
        target: Tensor,
        target_places: Tensor,
        source_layout: PageLayout,
        target_layout: PageLayout,
    ) -> None:
        """See KVKernels.transfer_rows. No target row may be among the source rows."""
        self.transfer_layers([source], source_places, [target], target_places, source_layout, target_layout)

    def transfer_layers(
        self,
        sources: Sequence[Tensor],
        source_places: Tensor,
        targets: Sequence[Tensor],
        target_places: Tensor,
        source_layout: PageLayout,
        target_layout: PageLayout,
    ) -> None:
        """The same rows of several layers in one launch: sources[i] to targets[i], equally many pages in each of
        a side. Buffers are on the device or page-locked on the host."""
        if not sources or len(sources) != len(targets):
            raise ValueError(f"{len(sources)} source buffers but {len(targets)} target buffers")
        kinds = (source_layout.data_bytes, source_layout.scale_bytes)
        if kinds != (target_layout.data_bytes, target_layout.scale_bytes):
            raise ValueError(f"rows of {source_layout} can't be copied to rows of {target_layout}")
        for side, buffers, places, layout in (
            ("source", sources, source_places, source_layout),
            ("target", targets, target_places, target_layout),
        ):
            for buffer in buffers:
                check_pages(buffer, layout, self._launcher, f"transfer_rows {side}")
                if buffer.shape[0] != buffers[0].shape[0]:
                    raise ValueError(f"transfer_rows {side}: {buffer.shape[0]} pages, others {buffers[0].shape[0]}")
            self._check_places(places, buffers[0], layout, f"transfer_rows {side}", least=-1)
        count = source_places.shape[0]
        if count != target_places.shape[0]:
            raise ValueError(f"{count} source places but {target_places.shape[0]} target places")
        kernel = "transfer_rows" if kinds == (C4_PAGE.data_bytes, C4_PAGE.scale_bytes) else "transfer_index_keys"
        self._launch(
            "transfer", kernel, (-(-count // 64), len(sources)),
            [
                self._address_list(sources), self._address_list(targets),
                source_places.data_ptr(), target_places.data_ptr(), count,
                *_pages(sources[0], source_layout)[1:], *_pages(targets[0], target_layout)[1:],
            ],
        )  # fmt: skip

    def swap_in(self, selected: Tensor, slots: Tensor, counts: Tensor, host: HostRows, hot: HotState) -> Tensor:
        """See KVKernels.swap_in. A batch row with a wrong argument is refused as a whole (-1, no state touched)."""
        check_swap_in(selected, slots, counts, host, hot, self._launcher)
        if self._strict:
            swap_in_cpu.check(selected, slots, counts, host, hot)
        batch, topk = selected.shape
        hash_log2 = max(1, (2 * topk - 1).bit_length())
        shared_bytes = 4 * (3 * (1 << hash_log2) + hot.hot_rows + 4 * topk + 33 + 256 + 8)
        if shared_bytes > self._launcher.shared_limit:
            raise ValueError(
                f"swap_in: top-{topk} of {hot.hot_rows} hot rows needs {shared_bytes} bytes of shared memory, "
                f"a block has {self._launcher.shared_limit}"
            )
        out = torch.empty_like(selected)
        question = [
            selected.data_ptr(), topk, slots.data_ptr(), counts.data_ptr(), host.table.data_ptr(), host.table.shape[1],
            int(host.table.dtype == torch.int64),
        ]  # fmt: skip
        state = [
            hot.entries.data_ptr(), hot.recency.data_ptr(), hot.entries.shape[0], hot.hot_rows, hot.rows_per_slot,
            hot.counters.data_ptr(), out.data_ptr(), hash_log2,
        ]  # fmt: skip
        host_pages = host.pages.shape[0]
        page_bytes = C4_PAGE.page_bytes
        if batch > self._split_up_to or selected.numel() > SPLIT_ENTRIES:
            buffers = [host.pages.data_ptr(), host_pages, hot.pages.data_ptr(), page_bytes]
            self._launch(
                "swap_in", "swap_in_fused", (batch, 1), question + buffers + state, threads=1024, shared=shared_bytes
            )
        else:
            lists = [self._list.data_ptr(), self._list_size.data_ptr()]
            self._launch(
                "swap_in", "swap_in_resolve", (batch, 1), [*question, host_pages, *state, *lists],
                threads=1024, shared=shared_bytes,
            )  # fmt: skip
            self._launch(
                "swap_in", "swap_in_copy", (self._copy_blocks(selected.numel()), 1),
                [host.pages.data_ptr(), hot.pages.data_ptr(), page_bytes, *lists], faults=False,
            )  # fmt: skip
        return out

    def _check_places(self, places: Tensor, pages: Tensor, layout: PageLayout, name: str, *, least: int = 0) -> None:
        if places.dim() != 1 or places.dtype != torch.int64:
            raise ValueError(f"{name}: places must be [n] int64, got {list(places.shape)} {places.dtype}")
        check_list(places, torch.int64, 1, self._launcher, f"{name}: places")
        check_pages(pages, layout, self._launcher, name)
        if self._strict:
            check_places(places, pages, layout, name, least=least)

    def _address_list(self, buffers: Sequence[Tensor]) -> int:
        """Address of the device's list of these buffers' addresses. Only the first use of a set of buffers copies it
        there (and waits); a service has few sets."""
        key = tuple(buffer.data_ptr() for buffer in buffers)
        if key not in self._addresses:
            if len(self._addresses) >= _MOST_ADDRESS_LISTS:
                self._addresses.clear()
            self._addresses[key] = torch.tensor(key, dtype=torch.int64).to(self._launcher.device)
        return self._addresses[key].data_ptr()

    def _warp_grid(self, rows: int) -> tuple[int, int]:
        """A warp a row, at most eight blocks a multiprocessor; the kernels stride over the rest."""
        return min(-(-rows // _WARPS), 8 * self._launcher.multiprocessors), 1

    def _copy_blocks(self, most_misses: int) -> int:
        """Blocks for `most_misses` rows: a warp takes four at a time; two blocks a multiprocessor fill PCIe."""
        return max(1, min(-(-most_misses // (4 * _WARPS)), 2 * self._launcher.multiprocessors))

    def _launch(
        self, source: str, kernel: str, grid: tuple[int, int], arguments: list[int], *,
        threads: int = 32 * _WARPS, shared: int = 0, faults: bool = True,
    ) -> None:  # fmt: skip
        if grid[0] == 0:
            return
        if faults:
            arguments = [*arguments, self._fault.data_ptr()]
        self._launcher.launch(source, kernel, grid, threads, shared, arguments)
        if self._strict:
            self.check_faults()


def _pages(pages: Tensor, layout: PageLayout) -> list[int]:
    """Address, pages, bytes a page and log2 of its rows, as the kernels take them."""
    return [pages.data_ptr(), pages.shape[0], layout.page_bytes, rows_log2(layout)]


def cuda_kernels(device: torch.device, *, strict: bool = False) -> CudaKernels:
    """The cuda backend on `device`. Raises ValueError or ImportError, see CupyLauncher."""
    return CudaKernels(CupyLauncher(device), strict=strict)
