"""Page-split buffers as two tensors of rows: data and scales. And the one check of row numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from common.kv.layout import PageLayout


def check_places(places: Tensor, pages: Tensor, layout: PageLayout, name: str, *, least: int = 0) -> None:
    """Raises ValueError unless `pages` is [n, page_bytes] uint8 of this layout and every place is one of its
    rows (or -1, where least = -1)."""
    if pages.dim() != 2 or pages.dtype != torch.uint8 or pages.shape[1] != layout.page_bytes:
        raise ValueError(f"{name}: pages must be [n, {layout.page_bytes}] uint8, got {list(pages.shape)} {pages.dtype}")
    if places.dim() != 1 or places.dtype != torch.int64:
        raise ValueError(f"{name}: places must be [n] int64, got {list(places.shape)} {places.dtype}")
    if places.numel() == 0:
        return
    low, high = int(places.min()), int(places.max())
    rows = pages.shape[0] * layout.rows
    if low < least or high >= rows:
        bad = low if low < least else high
        raise ValueError(f"{name}: row {bad} is not in [{least}, {rows})")


def data_words(pages: Tensor, layout: PageLayout) -> Tensor:
    """[n, rows, data_bytes / 8] int64 view of the rows' data."""
    words = pages.view(torch.int64)
    return words[:, : layout.scale_offset // 8].unflatten(1, (layout.rows, layout.data_bytes // 8))


def scale_bytes(pages: Tensor, layout: PageLayout) -> Tensor:
    """[n, rows, scale_bytes] uint8 view of the rows' scales."""
    end = layout.scale_offset + layout.rows * layout.scale_bytes
    return pages[:, layout.scale_offset : end].unflatten(1, (layout.rows, layout.scale_bytes))
