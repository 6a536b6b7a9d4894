"""The KV of a decode step in fixed shapes: every place is computed on the device, padding rows reach nothing.

Implements FixedDecodeKV. What all layers share (places, who closes a window, what is backed up) is computed once, by
`begin`; with graphs that is captured along with the layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.kernels.attention import DecodeAttention, PackedRows, top_entries_fixed
from common.kernels.interface import KVKernels
from common.kv.layout import C4_PAGE, C128_PAGE, INDEX_PAGE, WINDOW_PAGE, WINDOW_TOKENS
from common.kv.quantise import rotate_queries
from common.model.kv_store import CacheKind
from decode_service.decode_kv import BatchTables
from decode_service.device_pools import DevicePools
from decode_service.hisparse import HiSparseCoordinator


class FixedPagedKV:
    """Over the pools, for the requests in `tables` ([B] and [B, pages]; slots of padding rows are -1 in `tables.hot`
    and the pools' scratch slot elsewhere)."""

    def __init__(
        self, tables: BatchTables, positions: Tensor, device: DevicePools, hisparse: HiSparseCoordinator,
        kernels: KVKernels, attention: DecodeAttention, topk: int,
    ) -> None:  # fmt: skip
        self.positions = positions
        self._tables = tables
        self._device = device
        self._hisparse = hisparse
        self._kernels = kernels
        self._attention = attention
        self._topk = topk

    def begin(self) -> None:
        """Places of this step, from positions and tables as they are now."""
        tables, positions = self._tables, self.positions
        where = positions.device
        active = tables.hot >= 0
        back = torch.arange(WINDOW_TOKENS - 1, -1, -1, device=where)
        token = positions[:, None] - back
        held = (token >= 0) & active[:, None]
        slot = tables.window[:, None] * WINDOW_PAGE.rows
        self._window_places = torch.where(held, slot + token % WINDOW_PAGE.rows, -1)
        self._window_counts = torch.where(active, WINDOW_TOKENS, 0)
        self._window_target = torch.where(active, tables.window * WINDOW_PAGE.rows + positions % WINDOW_PAGE.rows, -1)
        self._rings = {
            count: (positions[:, None] - torch.arange(count - 1, -1, -1, device=where)) % count for count in (8, 128)
        }
        self._counts = torch.where(active, (positions + 1) // 4, 0)
        entry = positions // 4
        closing = active & ((positions + 1) % 4 == 0)
        page = tables.logical_pages.gather(1, (entry // INDEX_PAGE.rows)[:, None])[:, 0]
        self._index_target = torch.where(closing, page * INDEX_PAGE.rows + entry % INDEX_PAGE.rows, -1)
        self._births = self._hisparse.plan_births(tables.hot, closing, entry, tables.host_pages)
        entry128 = positions // 128
        page = tables.logical_pages.gather(1, (entry128 // C128_PAGE.rows)[:, None])[:, 0]
        closing128 = active & ((positions + 1) % 128 == 0)
        self._c128_target = torch.where(closing128, page * C128_PAGE.rows + entry128 % C128_PAGE.rows, -1)
        self._c128_counts = torch.where(active, (positions + 1) // 128, 0)
        row = torch.arange(C128_PAGE.rows, device=where)
        places = tables.logical_pages[:, :, None] * C128_PAGE.rows + row
        self._c128_places = torch.where(tables.logical_pages[:, :, None] >= 0, places, -1).flatten(1).contiguous()

    def extend_window(self, layer: int, rows: Tensor) -> None:
        self._kernels.pack_rows(rows.contiguous(), self._device.window[layer], self._window_target, WINDOW_PAGE)

    def extend_state(self, layer: int, kind: CacheKind, rows: Tensor) -> Tensor:
        state, slots = self._device.states[layer, kind], self._tables.state
        count = state.shape[1]
        state[slots, self.positions % count] = rows
        return state[slots[:, None], self._rings[count]]

    def append_entries(self, layer: int, kind: CacheKind, entries: Tensor) -> None:
        if kind is CacheKind.C4:
            self._hisparse.birth_planned(layer, self._births, entries)
        elif kind is CacheKind.INDEX:
            self._kernels.pack_index_keys(entries.contiguous(), self._device.index[layer], self._index_target)
        else:
            self._kernels.pack_rows(entries.contiguous(), self._device.c128[layer], self._c128_target, C128_PAGE)

    def select(self, layer: int, queries: Tensor, head_weights: Tensor) -> Tensor:
        table = self._tables.logical_pages
        scores = self._attention.index_scores(
            rotate_queries(queries), head_weights, self._device.index[layer], table, self._counts
        )
        return top_entries_fixed(scores, self._counts, self._topk)

    def attend(self, layer: int, queries: Tensor, sinks: Tensor, selected: Tensor | None) -> Tensor:
        near = PackedRows(self._device.window[layer], self._window_places, self._window_counts, WINDOW_PAGE)
        far: PackedRows | None = None
        if selected is not None:
            tables, state = self._tables, self._hisparse.hot_state(layer)
            places = self._hisparse.resolve(layer, selected, tables.hot, self._counts, tables.host_pages)
            far = PackedRows(state.pages, places, self._counts, C4_PAGE)
        elif layer in self._device.c128:
            far = PackedRows(self._device.c128[layer], self._c128_places, self._c128_counts, C128_PAGE)
        return self._attention.attend(queries, sinks, near, far)

    def end(self) -> None:
        """Behind the last layer: what was born before is on the host now."""
        self._hisparse.end_births_planned(self._births)
        self._hisparse.end_step()
