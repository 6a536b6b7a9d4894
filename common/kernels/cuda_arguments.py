"""Checks of what a CUDA kernel is handed: shapes, types, places. None of them waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from common.kernels.cuda_launch import Launcher
from common.kernels.interface import HostRows, HotState
from common.kv.layout import C4_PAGE, PageLayout

# Host rows and hot rows are 32-bit numbers inside swap_in.
MOST_ROWS = 2**31


def check_list(values: Tensor, dtype: torch.dtype, dimensions: int, launcher: Launcher, name: str) -> None:
    """Raises ValueError unless `values` is contiguous, of this type and on the launcher's device."""
    if values.dtype != dtype or values.dim() != dimensions or not values.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, {dimensions}-dimensional {dtype}, got {list(values.shape)} {values.dtype}"
        )
    if values.device != launcher.device:
        raise ValueError(f"{name} must be on {launcher.device}, is on {values.device}")


def check_pages(pages: Tensor, layout: PageLayout, launcher: Launcher, name: str) -> None:
    """Raises ValueError unless `pages` is [n, page_bytes] uint8 of this layout where kernels can reach it."""
    if pages.dim() != 2 or pages.dtype != torch.uint8 or pages.shape[1] != layout.page_bytes:
        raise ValueError(f"{name}: pages must be [n, {layout.page_bytes}] uint8, got {list(pages.shape)} {pages.dtype}")
    if not pages.is_contiguous() or pages.data_ptr() % 16:
        raise ValueError(f"{name}: pages must be contiguous and begin at a multiple of 16 bytes")
    if not launcher.reaches(pages):
        raise ValueError(f"{name}: pages are in pageable memory on {pages.device}; page-lock them")


def check_values(values: Tensor, width: int, launcher: Launcher, name: str) -> None:
    """Raises ValueError unless `values` is contiguous [n, width], fp32 or bf16, on the launcher's device."""
    if values.dim() != 2 or values.shape[1] != width:
        raise ValueError(f"{name} must be [n, {width}], got {list(values.shape)}")
    if values.dtype not in (torch.float32, torch.bfloat16) or not values.is_contiguous() or values.data_ptr() % 16:
        raise ValueError(f"{name} must be contiguous fp32 or bf16 at a multiple of 16 bytes, got {values.dtype}")
    if values.device != launcher.device:
        raise ValueError(f"{name} must be on {launcher.device}, is on {values.device}")


def rows_log2(layout: PageLayout) -> int:
    """Raises ValueError unless a page's rows are a power of two, which the kernels' shifts need."""
    if layout.rows & (layout.rows - 1):
        raise ValueError(f"the cuda kernels need a power of two of rows a page, got {layout.rows}")
    return layout.rows.bit_length() - 1


def check_swap_in(
    selected: Tensor, slots: Tensor, counts: Tensor, host: HostRows, hot: HotState, launcher: Launcher
) -> None:
    """Raises ValueError that names the argument. Values are checked on the device, row by row."""
    check_list(selected, torch.int64, 2, launcher, "swap_in: selected")
    check_list(slots, torch.int64, 1, launcher, "swap_in: slots")
    check_list(counts, torch.int64, 1, launcher, "swap_in: counts")
    table_type = torch.int64 if host.table.dtype == torch.int64 else torch.int32
    check_list(host.table, table_type, 2, launcher, "swap_in: host table")
    check_list(hot.entries, torch.int32, 2, launcher, "swap_in: entries")
    check_list(hot.recency, torch.int32, 2, launcher, "swap_in: recency")
    check_list(hot.counters, torch.int64, 1, launcher, "swap_in: counters")
    check_pages(host.pages, C4_PAGE, launcher, "swap_in host")
    check_pages(hot.pages, C4_PAGE, launcher, "swap_in hot")
    batch = selected.shape[0]
    for name, tensor in (("slots", slots), ("counts", counts), ("host table", host.table)):
        if tensor.shape[0] != batch:
            raise ValueError(f"swap_in: {name} has {tensor.shape[0]} rows, selected has {batch}")
    if selected.shape[1] > hot.hot_rows:
        raise ValueError(f"swap_in: {selected.shape[1]} selected entries do not fit {hot.hot_rows} hot rows")
    slots_there, width = hot.entries.shape
    if hot.recency.shape[0] != slots_there or width != hot.hot_rows + 1 or hot.counters.shape[0] != 2:
        raise ValueError(
            f"swap_in: entries {list(hot.entries.shape)}, recency {list(hot.recency.shape)} and counters "
            f"{list(hot.counters.shape)} do not belong together"
        )
    if hot.rows_per_slot < width or slots_there * hot.rows_per_slot > hot.pages.shape[0] * C4_PAGE.rows:
        raise ValueError(
            f"swap_in: {slots_there} slots of {hot.rows_per_slot} rows do not fit {hot.pages.shape[0]} hot pages"
        )
    for name, pages in (("host", host.pages), ("hot", hot.pages)):
        if pages.shape[0] * C4_PAGE.rows > MOST_ROWS:
            raise ValueError(f"swap_in: {pages.shape[0]} {name} pages hold more than {MOST_ROWS} rows")
