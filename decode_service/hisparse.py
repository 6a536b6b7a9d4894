"""HiSparse: all C4 rows of a request on the host, a small hot buffer of them on the device.

Per request and C4 layer the hot buffer has D rows in recency order and one more for the newest entry, which is
not yet on the host when decode reads it. While a request has at most D entries, entry e is at row e and nothing
is ever fetched. Counts are in entries (4 tokens each).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels.interface import HostRows, HotState, KVKernels
from common.kv.layout import C4_PAGE, host_token_len
from decode_service.device_pools import CPU
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.page_allocator import PageAllocator
from decode_service.resources import RequestResources


@dataclass(frozen=True)
class HotCounters:
    """Since start, over all layers: selected entries found on the device, fetched from the host, rows backed up."""

    hits: int
    misses: int
    backups: int


@dataclass(frozen=True)
class Births:
    """The entries that a step of B sequences completes, places of rows -1 where there is none. All [B] int64.

    slot: where the table is written, the scratch slot for sequences without a birth; column: the row inside the slot;
    target: the row of the hot pages; backup_source, backup_target: hot row and host row of the entry before it, where
    the host lacks that; on_host: entries that the host has after the step."""

    slot: Tensor
    column: Tensor
    target: Tensor
    entry: Tensor
    backup_source: Tensor
    backup_target: Tensor
    on_host: Tensor


class HiSparseCoordinator:
    """Used by the engine's thread; `counters` may be read from any."""

    def __init__(
        self, host: DeepSeekV4PagedHostPool, kernels: KVKernels, slots: int, hot_entries: int,
        shuffle_seed: int | None = None, device: torch.device = CPU,
    ) -> None:  # fmt: skip
        """`hot_entries` is D, at least the model's index_topk."""
        self.slots = PageAllocator("hot", slots, shuffle_seed)
        self.hot_entries = hot_entries
        self._host = host
        self._kernels = kernels
        self._device = device
        pages = -(-(hot_entries + 1) // C4_PAGE.rows)
        self._rows_per_slot = pages * C4_PAGE.rows
        # One more slot takes what the padding of a captured step writes.
        self._scratch = slots
        slots += 1
        self._hot = {
            layer: HotState(
                pages=torch.zeros(slots * pages, C4_PAGE.page_bytes, dtype=torch.uint8, device=self._device),
                entries=torch.full((slots, hot_entries + 1), -1, dtype=torch.int32, device=self._device),
                recency=torch.arange(hot_entries, dtype=torch.int32, device=self._device).repeat(slots, 1),
                counters=torch.zeros(2, dtype=torch.int64, device=self._device),
                rows_per_slot=self._rows_per_slot,
            )
            for layer in host.buffers
        }
        # Entries of each slot's request that the host has.
        self._on_host = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._backups = 0

    @property
    def slot_bytes(self) -> int:
        """Device bytes of one request over all layers."""
        return self._rows_per_slot // C4_PAGE.rows * C4_PAGE.page_bytes * len(self._hot)

    @property
    def counters(self) -> HotCounters:
        hits = sum(int(hot.counters[0]) for hot in self._hot.values())
        misses = sum(int(hot.counters[1]) for hot in self._hot.values())
        return HotCounters(hits, misses, self._backups)

    def hot_state(self, layer: int) -> HotState:
        """For tests and integrity checks."""
        return self._hot[layer]

    def admit_request_direct(self, resources: RequestResources, tokens: int) -> None:
        """The pages of a prompt of `tokens` tokens have landed on the host: prepares the slot for decoding.

        A request that fits is loaded whole; a longer one starts with an empty table. In both cases the newest
        entry is placed in the newest-entry row. Never reads host rows beyond tokens // 4.
        """
        entries = host_token_len(tokens)
        slot, rows = resources.hot_slot, self.hot_entries
        table = torch.tensor(resources.host_pages, dtype=torch.int64, device=self._device)
        loaded = torch.arange(entries if entries <= rows else 0, device=self._device)
        ids, places = loaded, loaded
        if entries:
            newest = torch.tensor([entries - 1], device=self._device)
            ids, places = torch.cat([loaded, newest]), torch.cat([loaded, torch.tensor([rows], device=self._device)])
        base = slot * self._rows_per_slot
        for layer, hot in self._hot.items():
            hot.entries[slot] = -1
            hot.recency[slot] = torch.arange(rows, dtype=torch.int32, device=self._device)
            if entries:
                host_rows = table[ids // C4_PAGE.rows] * C4_PAGE.rows + ids % C4_PAGE.rows
                self._host.load_rows(layer, host_rows, hot.pages, base + places)
                hot.entries[slot, places] = ids.to(torch.int32)
        self._on_host[slot] = entries

    def birth(self, layer: int, slots: Tensor, table: Tensor, entries: Tensor, rows: Tensor) -> None:
        """New entries [n] int64 of the requests in `slots` [n]: rows [n, 512] become visible to this step.

        `table` [n, pages] are the requests' host pages. What the newest-entry row held is first backed up to its
        host row, unless the host has it already. Backups are row by row, however many there are.
        """
        hot, limit = self._hot[layer], self.hot_entries
        base = slots * self._rows_per_slot
        previous = entries - 1
        behind = ((previous >= 0) & (self._on_host[slots] <= previous)).nonzero().flatten()
        if behind.numel():
            entry = previous[behind]
            page = table[behind, entry // C4_PAGE.rows].long()
            host_rows = page * C4_PAGE.rows + entry % C4_PAGE.rows
            device_rows = base[behind] + torch.where(entry < limit, entry, limit)
            self._host.backup_rows(layer, host_rows, hot.pages, device_rows)
            self._backups += int(behind.numel())
        place = torch.where(entries < limit, entries, limit)
        self._kernels.pack_rows(rows, hot.pages, base + place, C4_PAGE)
        hot.entries[slots, place] = entries.to(torch.int32)

    def host_pages(self, layer: int) -> Tensor:
        return self._host.buffers[layer]

    def plan_births(self, slots: Tensor, closing: Tensor, entries: Tensor, table: Tensor) -> Births:
        """For a step in fixed shapes: slots [B] (-1 = padding), closing [B] bool, the entries [B] int64 that close and
        the host pages [B, pages]. Waits for nothing."""
        limit = self.hot_entries
        base = slots * self._rows_per_slot
        safe = torch.where(slots >= 0, slots, self._scratch)
        previous = (entries - 1).clamp(min=0)
        behind = closing & (entries >= 1) & (self._on_host[safe] <= previous)
        column = torch.where(entries < limit, entries, limit)
        page = table.gather(1, (previous // C4_PAGE.rows)[:, None])[:, 0]
        source = base + torch.where(previous < limit, previous, limit)
        return Births(
            slot=torch.where(closing, safe, self._scratch),
            column=column,
            target=torch.where(closing, base + column, -1),
            entry=entries,
            backup_source=torch.where(behind, source, -1),
            backup_target=torch.where(behind, page * C4_PAGE.rows + previous % C4_PAGE.rows, -1),
            on_host=torch.where(closing, torch.maximum(self._on_host[safe], entries), self._on_host[safe]),
        )

    def birth_planned(self, layer: int, births: Births, rows: Tensor) -> None:
        """As `birth`, for rows [B, 512] of which some are left out."""
        hot = self._hot[layer]
        self._kernels.transfer_rows(
            hot.pages, births.backup_source, self._host.buffers[layer], births.backup_target, C4_PAGE, C4_PAGE
        )
        self._kernels.pack_rows(rows.contiguous(), hot.pages, births.target, C4_PAGE)
        hot.entries[births.slot, births.column] = births.entry.to(torch.int32)

    def end_births_planned(self, births: Births) -> None:
        self._on_host[births.slot] = births.on_host

    def end_births(self, slots: Tensor, entries: Tensor) -> None:
        """After the last layer of a step in which `entries` were born: everything older is on the host now."""
        self._on_host[slots] = torch.maximum(self._on_host[slots], entries)

    def gather(self, layer: int, selected: Tensor, slots: Tensor, counts: Tensor, table: Tensor) -> Tensor:
        """Rows of selected entries [B, K] (-1 = none), [B, K, 512] fp32; missing ones are swapped in."""
        hot = self._hot[layer]
        places = self._kernels.swap_in(selected, slots, counts, HostRows(self._host.buffers[layer], table), hot)
        rows = self._kernels.unpack_rows(hot.pages, places.flatten(), C4_PAGE)
        return rows.view(*selected.shape, -1)

    def release(self, slot: int) -> None:
        """The request is over; its tables are cleared so that no later one can hit its rows."""
        for hot in self._hot.values():
            hot.entries[slot] = -1
        self._on_host[slot] = 0

    def check_integrity(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Raises ValueError unless each slot's recency is a permutation and its table names each of the request's
        `counts` entries at most once and no other."""
        for layer, hot in self._hot.items():
            for slot, count in zip(slots, counts, strict=True):
                order = hot.recency[slot].sort().values.cpu()
                if not torch.equal(order, torch.arange(self.hot_entries, dtype=torch.int32)):
                    raise ValueError(f"layer {layer} slot {slot}: recency is no permutation of its rows")
                held = hot.entries[slot, : self.hot_entries]
                held = held[held >= 0]
                if held.unique().numel() != held.numel() or (held.numel() and int(held.max()) >= count):
                    raise ValueError(f"layer {layer} slot {slot}: table {held.tolist()} of {count} entries")
