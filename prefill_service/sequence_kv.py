"""The KV of one prompt while it is computed: what attention reads, and the packed bytes that leave.

Attention reads fp32 values that have gone through their packed form, so that prefill sees exactly what decode
will see. Entries are packed by the kernels straight into the chunk's staging pages, which lie in the send ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels.interface import KVKernels
from common.kv.layout import (
    C4_PAGE,
    C128_PAGE,
    INDEX_PAGE,
    INDEX_VALUES,
    ROW_VALUES,
    WINDOW_TOKENS,
)
from common.kv.quantise import dequantise_rows, quantise_rows, rotate_queries
from common.model.config import ModelConfig
from common.model.kv_store import CacheKind

_PAGES = {CacheKind.C4: C4_PAGE, CacheKind.INDEX: INDEX_PAGE, CacheKind.C128: C128_PAGE}
CPU = torch.device("cpu")
Staging = Mapping[tuple[int, CacheKind], Tensor]


@dataclass
class _Window:
    """The last rows of a layer, at most 128: packed (data [n, 576], scales [n, 8]) and as values [n, 512]."""

    data: Tensor
    scales: Tensor
    values: Tensor


class _Growing:
    """Rows [n, width] fp32 that grow at the end; capacity doubles."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._rows = torch.empty(0, width, device=device)
        self.count = 0

    def append(self, rows: Tensor) -> Tensor:
        end = self.count + rows.shape[0]
        if end > self._rows.shape[0]:
            grown = self._rows.new_empty(max(end, 2 * self._rows.shape[0], 256), self._rows.shape[1])
            grown[: self.count] = self._rows[: self.count]
            self._rows = grown
        self._rows[self.count : end] = rows
        self.count = end
        return self._rows[:end]


class SequenceKV:
    """Implements PrefillKV for one prompt. `stage` must be called before each chunk."""

    def __init__(self, config: ModelConfig, kernels: KVKernels, device: torch.device = CPU) -> None:
        self.length = 0
        self._config = config
        self._kernels = kernels
        self._device = device
        self._windows: dict[int, _Window] = {}
        self._states: dict[tuple[int, CacheKind], Tensor] = {}
        self._entries: dict[tuple[int, CacheKind], _Growing] = {}
        self._staging: Staging = {}

    def stage(self, staging: Staging) -> None:
        """Where the next chunk's entries are packed: for each layer and cache [pages, page_bytes] uint8, the first
        page being the one that the chunk's first entry falls into (chunks begin on page borders)."""
        self._staging = staging

    def extend_window(self, layer: int, rows: Tensor) -> Tensor:
        data, scales = quantise_rows(rows)
        values = dequantise_rows(data, scales)
        last = self._windows.get(layer)
        if last is not None:
            before = min(self.length, WINDOW_TOKENS - 1)
            out = torch.cat([last.values[last.values.shape[0] - before :], values])
            data, scales = torch.cat([last.data, data]), torch.cat([last.scales, scales])
            values = torch.cat([last.values, values])
        else:
            out = values
        keep = slice(max(0, values.shape[0] - WINDOW_TOKENS), None)
        self._windows[layer] = _Window(data[keep], scales[keep], values[keep])
        return out

    def extend_state(self, layer: int, kind: CacheKind, rows: Tensor) -> Tensor:
        before = self._states.get((layer, kind))
        held = rows if before is None else torch.cat([before, rows])
        end = self.length + rows.shape[0]
        begun = end // kind.ratio * kind.ratio
        first = begun if kind is CacheKind.C128 else max(0, begun - kind.ratio)
        self._states[layer, kind] = held[held.shape[0] - (end - first) :].clone()
        return held

    def extend_entries(self, layer: int, kind: CacheKind, entries: Tensor) -> Tensor:
        width = INDEX_VALUES if kind is CacheKind.INDEX else ROW_VALUES
        cache = self._entries.setdefault((layer, kind), _Growing(width, self._device))
        pages = self._staging[layer, kind]
        places = torch.arange(entries.shape[0], device=self._device)
        if entries.shape[0] == 0:
            return cache.append(entries.new_empty(0, width))
        if kind is CacheKind.INDEX:
            self._kernels.pack_index_keys(entries, pages, places)
            values = self._kernels.unpack_index_pages(pages, torch.arange(pages.shape[0], device=self._device))[
                : entries.shape[0]
            ]
        else:
            self._kernels.pack_rows(entries, pages, places, _PAGES[kind])
            values = self._kernels.unpack_rows(pages, places, _PAGES[kind])
        return cache.append(values)

    def rotate_index_queries(self, queries: Tensor) -> Tensor:
        return rotate_queries(queries)

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def window_rows(self, layer: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Packed rows of positions first ... first+count-1 (among the last 128): data, scales."""
        window = self._windows[layer]
        begin = first - (self.length - window.data.shape[0])
        return window.data[begin : begin + count], window.scales[begin : begin + count]

    def state_rows(self, layer: int, kind: CacheKind, first: int, count: int) -> Tensor:
        """Raw compressor rows of live positions first ... first+count-1, fp32."""
        rows = self._states[layer, kind]
        begin = first - (self.length - rows.shape[0])
        return rows[begin : begin + count]
