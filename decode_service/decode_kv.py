"""The KV of the running batch over the pools: what the model's decode step reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels.interface import KVKernels
from common.kv.layout import C128_PAGE, INDEX_PAGE, WINDOW_PAGE, WINDOW_TOKENS
from common.kv.quantise import rotate_queries
from common.model.kv_store import CacheKind
from decode_service.device_pools import CPU, DevicePools
from decode_service.hisparse import HiSparseCoordinator
from decode_service.resources import RequestResources

PAD_ENTRIES = 64


@dataclass(frozen=True)
class BatchTables:
    """Where the requests of a batch have their memory; rebuilt when the batch changes. [B] and [B, pages]."""

    window: Tensor
    state: Tensor
    hot: Tensor
    host_pages: Tensor
    logical_pages: Tensor

    @classmethod
    def of(cls, resources: list[RequestResources], device: torch.device = CPU) -> BatchTables:
        def table(lists: list[Sequence[int]]) -> Tensor:
            width = max(1, *(len(pages) for pages in lists)) if lists else 1
            return torch.tensor(
                [[*pages, *([-1] * (width - len(pages)))] for pages in lists], dtype=torch.int64, device=device
            )

        return cls(
            window=torch.tensor([r.window_slot for r in resources], device=device),
            state=torch.tensor([r.state_slot for r in resources], device=device),
            hot=torch.tensor([r.hot_slot for r in resources], device=device),
            host_pages=table([r.host_pages for r in resources]),
            logical_pages=table([r.logical_pages for r in resources]),
        )


class PagedDecodeKV:
    """Implements DecodeKV. `positions` [B] int64 is set before each step; `end_step` is called behind it."""

    def __init__(
        self, tables: BatchTables, positions: Tensor, device: DevicePools, hisparse: HiSparseCoordinator,
        kernels: KVKernels,
    ) -> None:  # fmt: skip
        self.positions = positions
        self._tables = tables
        self._device = device
        self._hisparse = hisparse
        self._kernels = kernels
        back = torch.arange(WINDOW_TOKENS - 1, -1, -1, device=positions.device)
        place = positions[:, None] - back
        self._window_places = torch.where(
            place >= 0, tables.window[:, None] * WINDOW_PAGE.rows + place % WINDOW_PAGE.rows, -1
        ).flatten()
        self._born: tuple[Tensor, Tensor] | None = None

    def extend_window(self, layer: int, rows: Tensor) -> Tensor:
        pages = self._device.window[layer]
        places = self._tables.window * WINDOW_PAGE.rows + self.positions % WINDOW_PAGE.rows
        self._kernels.pack_rows(rows, pages, places, WINDOW_PAGE)
        return self._kernels.unpack_rows(pages, self._window_places, WINDOW_PAGE).view(len(rows), WINDOW_TOKENS, -1)

    def extend_state(self, layer: int, kind: CacheKind, rows: Tensor, closing: Tensor) -> Tensor:
        state = self._device.states[layer, kind]
        count = state.shape[1]
        state[self._tables.state, self.positions % count] = rows
        older = torch.arange(count - 1, -1, -1, device=rows.device)
        ring = (self.positions[closing, None] - older) % count
        return state[self._tables.state[closing, None], ring]

    def append_entries(self, layer: int, kind: CacheKind, closing: Tensor, entries: Tensor) -> None:
        ids = self.positions[closing] // kind.ratio
        if kind is CacheKind.C4:
            slots = self._tables.hot[closing]
            self._hisparse.birth(layer, slots, self._tables.host_pages[closing], ids, entries)
            self._born = (slots, ids)
            return
        per_page = INDEX_PAGE.rows if kind is CacheKind.INDEX else C128_PAGE.rows
        pages = self._tables.logical_pages[closing, ids // per_page]
        places = pages * per_page + ids % per_page
        if kind is CacheKind.INDEX:
            self._kernels.pack_index_keys(entries, self._device.index[layer], places)
        else:
            self._kernels.pack_rows(entries, self._device.c128[layer], places, C128_PAGE)

    def rotate_index_queries(self, queries: Tensor) -> Tensor:
        return rotate_queries(queries)

    def index_keys(self, layer: int) -> list[Tensor]:
        found: list[Tensor] = []
        for row, count in enumerate(((self.positions + 1) // 4).tolist()):
            pages = -(-count // INDEX_PAGE.rows)
            keys = self._kernels.unpack_index_pages(self._device.index[layer], self._tables.logical_pages[row, :pages])
            # A page may hold what an earlier request left behind the entries of this one.
            keys[count:] = 0
            found.append(keys)
        return found

    def gather_c4(self, layer: int, entries: Tensor) -> Tensor:
        counts = (self.positions + 1) // 4
        return self._hisparse.gather(layer, entries, self._tables.hot, counts, self._tables.host_pages)

    def c128_entries(self, layer: int) -> list[Tensor]:
        counts: list[int] = ((self.positions + 1) // 128).tolist()
        padded = [-(-count // PAD_ENTRIES) * PAD_ENTRIES for count in counts]
        places: list[Tensor] = []
        for row, (count, size) in enumerate(zip(counts, padded, strict=True)):
            entry = torch.arange(size, device=self.positions.device)
            pages = self._tables.logical_pages[row, (entry // C128_PAGE.rows).clamp(max=max(0, (count - 1) // 2))]
            places.append(torch.where(entry < count, pages * C128_PAGE.rows + entry % C128_PAGE.rows, -1))
        rows = self._kernels.unpack_rows(self._device.c128[layer], torch.cat(places), C128_PAGE)
        return list(rows.split(padded))

    def end_step(self) -> None:
        """The step is complete in every layer."""
        if self._born is not None:
            self._hisparse.end_births(*self._born)
        self._hisparse.end_step()
