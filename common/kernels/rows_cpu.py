"""Pack, unpack and copy rows of page-split buffers, in vectorised torch: the definition for other backends."""

from __future__ import annotations

import torch
from torch import Tensor

from common.kernels.page_views import check_places, data_words, scale_bytes
from common.kv.layout import INDEX_PAGE, PageLayout
from common.kv.quantise import dequantise_index_keys, dequantise_rows, quantise_index_keys, quantise_rows


def pack_rows(rows: Tensor, pages: Tensor, places: Tensor, layout: PageLayout) -> None:
    """See KVKernels.pack_rows."""
    check_places(places, pages, layout, "pack_rows", least=-1)
    _same_length(rows.shape[0], places.shape[0], "rows", "places")
    rows, places = _kept(rows, places)
    data, scales = quantise_rows(rows)
    _write(data, scales, pages, places, layout)


def unpack_rows(pages: Tensor, places: Tensor, layout: PageLayout) -> Tensor:
    """See KVKernels.unpack_rows."""
    check_places(places, pages, layout, "unpack_rows", least=-1)
    absent = places < 0
    some_absent = bool(absent.any())
    where = places.clamp(min=0) if some_absent else places
    page, row = where // layout.rows, where % layout.rows
    data = data_words(pages, layout)[page, row].view(torch.uint8)
    scales = scale_bytes(pages, layout)[page, row]
    if some_absent:
        data[absent] = 0
        scales[absent] = 0
    return dequantise_rows(data, scales)


def pack_index_keys(keys: Tensor, pages: Tensor, places: Tensor) -> None:
    """See KVKernels.pack_index_keys."""
    check_places(places, pages, INDEX_PAGE, "pack_index_keys", least=-1)
    _same_length(keys.shape[0], places.shape[0], "keys", "places")
    keys, places = _kept(keys, places)
    data, scales = quantise_index_keys(keys)
    _write(data, scales.unsqueeze(1).view(torch.uint8), pages, places, INDEX_PAGE)


def unpack_index_pages(pages: Tensor, page_ids: Tensor) -> Tensor:
    """See KVKernels.unpack_index_pages."""
    check_places(page_ids * INDEX_PAGE.rows, pages, INDEX_PAGE, "unpack_index_pages")
    chosen = pages[page_ids]
    data = chosen[:, : INDEX_PAGE.scale_offset].reshape(-1, INDEX_PAGE.data_bytes)
    scales = chosen[:, INDEX_PAGE.scale_offset :].contiguous().view(torch.float32).flatten()
    return dequantise_index_keys(data, scales)


def transfer_rows(
    source: Tensor,
    source_places: Tensor,
    target: Tensor,
    target_places: Tensor,
    source_layout: PageLayout,
    target_layout: PageLayout,
) -> None:
    """See KVKernels.transfer_rows."""
    check_places(source_places, source, source_layout, "transfer_rows source", least=-1)
    check_places(target_places, target, target_layout, "transfer_rows target", least=-1)
    _same_length(source_places.shape[0], target_places.shape[0], "source places", "target places")
    if (source_layout.data_bytes, source_layout.scale_bytes) != (target_layout.data_bytes, target_layout.scale_bytes):
        raise ValueError(f"rows of {source_layout} can't be copied to rows of {target_layout}")
    left_out = (source_places < 0) | (target_places < 0)
    if bool(left_out.any()):
        source_places, target_places = source_places[~left_out], target_places[~left_out]
    if source_layout == target_layout and _whole_pages(source_places, target_places, source_layout.rows):
        step = source_layout.rows
        target[target_places[::step] // step] = source[source_places[::step] // step]
        return
    from_page, from_row = source_places // source_layout.rows, source_places % source_layout.rows
    to_page, to_row = target_places // target_layout.rows, target_places % target_layout.rows
    data_words(target, target_layout)[to_page, to_row] = data_words(source, source_layout)[from_page, from_row]
    scale_bytes(target, target_layout)[to_page, to_row] = scale_bytes(source, source_layout)[from_page, from_row]


def _whole_pages(source: Tensor, target: Tensor, rows: int) -> bool:
    """Whether both lists are whole pages in row order: consecutive numbers from a page's first row on."""
    if source.shape[0] == 0 or source.shape[0] % rows:
        return False
    inside = torch.arange(rows)
    return all(
        bool((places.view(-1, rows) - places[::rows, None] == inside).all()) for places in (source, target)
    ) and (bool((source[::rows] % rows == 0).all()) and bool((target[::rows] % rows == 0).all()))


def _kept(values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Without those whose place is -1."""
    kept = places >= 0
    return (values, places) if bool(kept.all()) else (values[kept], places[kept])


def _write(data: Tensor, scales: Tensor, pages: Tensor, places: Tensor, layout: PageLayout) -> None:
    page, row = places // layout.rows, places % layout.rows
    data_words(pages, layout)[page, row] = data.view(torch.int64)
    scale_bytes(pages, layout)[page, row] = scales


def _same_length(left: int, right: int, left_name: str, right_name: str) -> None:
    if left != right:
        raise ValueError(f"{left} {left_name} but {right} {right_name}")
