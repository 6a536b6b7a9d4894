"""HiSparse: all C4 rows of a request on the host, some of them in two more homes on the device.

Per request and C4 layer the hot buffer has D rows in recency order and one more for the newest entry, which is
not yet on the host when decode reads it. While a request has at most D entries, entry e is at row e and nothing
is ever fetched. A longer request also has resident pages while there is room (residency.py): their rows are read in
place, all others through the hot buffer. Counts are in entries (4 tokens each).
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
from decode_service.residency import ResidentPages
from decode_service.resources import RequestResources

# Pages that one step brings in, at most: a step is delayed by their copies.
FILLS_PER_STEP = 64


@dataclass(frozen=True)
class HotCounters:
    """Since start, over all layers: selected entries found in resident pages, found in the hot buffer and fetched from
    the host, rows backed up; pages (all layers at once) made resident from the host and given up for others."""

    resident: int
    hits: int
    misses: int
    backups: int
    loads: int
    spills: int


@dataclass(frozen=True)
class Births:
    """The entries that a step of B sequences completes, places of rows -1 where there is none. All [B] int64.

    slot: where the table is written, the scratch slot for sequences without a birth; column: the row inside the slot;
    target: the row of the hot pages; resident: the row in its resident page; backup_source, backup_target: hot row and
    host row of the entry before it, where the host lacks that; on_host: entries that the host has after the step."""

    slot: Tensor
    column: Tensor
    target: Tensor
    resident: Tensor
    entry: Tensor
    backup_source: Tensor
    backup_target: Tensor
    on_host: Tensor


class HiSparseCoordinator:
    """Used by the engine's thread; `counters` may be read from any."""

    def __init__(
        self, host: DeepSeekV4PagedHostPool, kernels: KVKernels, slots: int, hot_entries: int,
        shuffle_seed: int | None = None, device: torch.device = CPU, resident_pages: int = 0,
        most_pages: int = 0,
    ) -> None:  # fmt: skip
        """`hot_entries` is D, at least the model's index_topk. `resident_pages` of 64 entries are shared by all;
        a request has at most `most_pages` host pages (0 = the whole pool)."""
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
        layers = list(host.buffers)
        # A row a layer: hits and misses of its swap-ins; the last one: entries found resident, rows backed up.
        self._counts = torch.zeros(len(layers) + 1, 2, dtype=torch.int64, device=self._device)
        self._seen = self._counts if device.type != "cuda" else torch.zeros_like(self._counts, device=CPU).pin_memory()
        self._hot = {
            layer: HotState(
                pages=torch.zeros(
                    slots * pages + resident_pages, C4_PAGE.page_bytes, dtype=torch.uint8, device=self._device
                ),
                entries=torch.full((slots, hot_entries + 1), -1, dtype=torch.int32, device=self._device),
                recency=torch.arange(hot_entries, dtype=torch.int32, device=self._device).repeat(slots, 1),
                counters=self._counts[index],
                rows_per_slot=self._rows_per_slot,
            )
            for index, layer in enumerate(layers)
        }
        self.resident = ResidentPages(resident_pages, shuffle_seed)
        # Entries of each slot's prompt.
        self._landed = [0] * slots
        self._loads = 0
        # Resident page r is page first_resident + r of the hot pages; the table says r of each slot's pages, -1 = none.
        self._first_resident = slots * pages
        self._most_pages = most_pages or host.allocator.total
        self._resident = torch.full(
            (slots, self._most_pages if resident_pages else 0), -1, dtype=torch.int32, device=self._device
        )
        # Entries of each slot's request that the host has.
        self._on_host = torch.zeros(slots, dtype=torch.int64, device=self._device)

    @property
    def slot_bytes(self) -> int:
        """Device bytes of one request over all layers."""
        return self._rows_per_slot // C4_PAGE.rows * C4_PAGE.page_bytes * len(self._hot)

    @property
    def counters(self) -> HotCounters:
        """As of the last step; reading them waits for nothing."""
        seen = self._seen.tolist()
        resident, backups = seen[-1]
        hits, misses = (sum(row[place] for row in seen[:-1]) for place in (0, 1))
        return HotCounters(resident, hits, misses, backups, self._loads, self.resident.spills)

    def hot_state(self, layer: int) -> HotState:
        """For tests and integrity checks."""
        return self._hot[layer]

    def admit_request_direct(self, resources: RequestResources, tokens: int) -> None:
        """The pages of a prompt of `tokens` tokens have landed on the host: prepares the slot for decoding.

        A request that fits is loaded whole; a longer one starts with an empty table and its last page resident, if
        there is one to have. In both cases the newest entry is placed in the newest-entry row. Never reads host rows
        beyond tokens // 4.
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
        tail = self._open_tail(slot, entries)
        for layer, hot in self._hot.items():
            hot.entries[slot] = -1
            hot.recency[slot] = torch.arange(rows, dtype=torch.int32, device=self._device)
            if entries:
                host_rows = table[ids // C4_PAGE.rows] * C4_PAGE.rows + ids % C4_PAGE.rows
                self._host.load_rows(layer, host_rows, hot.pages, base + places)
                hot.entries[slot, places] = ids.to(torch.int32)
            if tail is not None:
                row = torch.arange(entries % C4_PAGE.rows, device=self._device)
                host_rows = table[entries // C4_PAGE.rows] * C4_PAGE.rows + row
                self._host.load_rows(layer, host_rows, hot.pages, self.resident_row(tail) + row)
        self._on_host[slot] = self._landed[slot] = entries

    def _open_tail(self, slot: int, entries: int) -> int | None:
        """The resident page for the last `entries` % 64 entries of a prompt; the table is told by the next step."""
        if not self.resident.allocator.total or entries <= self.hot_entries:
            return None
        self.resident.begin(slot, entries // C4_PAGE.rows)
        return self.resident.open(slot) if entries % C4_PAGE.rows else None

    def resident_row(self, page: int) -> int:
        """The first row of a resident page in the hot pages."""
        return (self._first_resident + page) * C4_PAGE.rows

    def prepare_step(self, resources: Sequence[RequestResources], positions: Sequence[int]) -> None:
        """Before a step of these requests at these positions: room for the entries that will be born, and what there
        is room for is made resident. Waits for nothing."""
        if not self.resident.allocator.total:
            return
        loads: dict[int, int] = {}
        for request, position in zip(resources, positions, strict=True):
            slot, entry = request.hot_slot, position // 4
            if position % 4 == 3 and entry % C4_PAGE.rows == 0 and entry >= self.hot_entries:
                if not self.resident.has_begun(slot):
                    self.resident.begin(slot, entry // C4_PAGE.rows)
                self.resident.open(slot)
        for request, position in zip(resources, positions, strict=True):
            # Of the entries born here the newest is not on the host.
            slot = request.hot_slot
            on_host = max(self._landed[slot], position // 4 - 1)
            while len(loads) < FILLS_PER_STEP:
                page = self.resident.before(slot)
                taken = self.resident.fill(slot) if page >= 0 and (page + 1) * C4_PAGE.rows <= on_host else None
                if taken is None:
                    break
                # A page that this step has filled already and that was spilled since is filled for its new holder.
                loads[taken] = request.host_pages[page]
        changes = self.resident.take_changes()
        if changes:
            where = torch.tensor(list(changes))
            ids = torch.tensor(list(changes.values()), dtype=torch.int32)
            self._resident[self._there(where[:, 0]), self._there(where[:, 1])] = self._there(ids)
        if loads:
            self._load(loads)

    def _load(self, pages: dict[int, int]) -> None:
        """Host pages into resident pages: resident id -> host page."""
        row = torch.arange(C4_PAGE.rows)
        targets, sources = torch.tensor(list(pages.items())).unbind(1)
        host_rows = self._there((sources[:, None] * C4_PAGE.rows + row).flatten())
        rows = self._there(((self._first_resident + targets)[:, None] * C4_PAGE.rows + row).flatten())
        for layer, hot in self._hot.items():
            self._kernels.transfer_rows(self._host.buffers[layer], host_rows, hot.pages, rows, C4_PAGE, C4_PAGE)
        self._loads += len(pages)

    def _there(self, numbers: Tensor) -> Tensor:
        """On the device, without waiting for it."""
        return numbers.to(self._device, non_blocking=True)

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
            self._counts[-1, 1] += behind.numel()
        place = torch.where(entries < limit, entries, limit)
        self._kernels.pack_rows(rows, hot.pages, base + place, C4_PAGE)
        if self.resident.allocator.total:
            self._kernels.pack_rows(
                rows, hot.pages, self._resident_rows(slots[:, None], entries[:, None])[:, 0], C4_PAGE
            )
        hot.entries[slots, place] = entries.to(torch.int32)

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
            resident=torch.where(closing, self._resident_rows(safe[:, None], entries[:, None])[:, 0], -1),
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
        rows = rows.contiguous()
        self._kernels.pack_rows(rows, hot.pages, births.target, C4_PAGE)
        if self.resident.allocator.total:
            self._kernels.pack_rows(rows, hot.pages, births.resident, C4_PAGE)
        hot.entries[births.slot, births.column] = births.entry.to(torch.int32)

    def end_births_planned(self, births: Births) -> None:
        self._on_host[births.slot] = births.on_host
        self._counts[-1, 1] += (births.backup_target >= 0).sum() * len(self._hot)

    def end_births(self, slots: Tensor, entries: Tensor) -> None:
        """After the last layer of a step in which `entries` were born: everything older is on the host now."""
        self._on_host[slots] = torch.maximum(self._on_host[slots], entries)

    def end_step(self) -> None:
        """Behind a step: shows its counts to those who read `counters`."""
        if self._seen is not self._counts:
            self._seen.copy_(self._counts, non_blocking=True)

    def resolve(self, layer: int, selected: Tensor, slots: Tensor, counts: Tensor, table: Tensor) -> Tensor:
        """Rows of hot_state(layer).pages, [B, K] int64, where the selected entries [B, K] int64 (-1 = none) are: in
        their resident page if there is one, else in the hot buffer, into which missing ones are swapped in. Arguments
        as of KVKernels.swap_in, `table` [B, pages] the requests' host pages."""
        hot = self._hot[layer]
        host = HostRows(self._host.buffers[layer], table)
        if not self.resident.allocator.total:
            return self._kernels.swap_in(selected, slots, counts, host, hot)
        rows = self._resident_rows(torch.where(slots >= 0, slots, self._scratch)[:, None], selected)
        found = rows >= 0
        self._counts[-1, 0] += found.sum()
        elsewhere = self._kernels.swap_in(selected.masked_fill(found, -1), slots, counts, host, hot)
        return torch.where(found, rows, elsewhere)

    def _resident_rows(self, slots: Tensor, entries: Tensor) -> Tensor:
        """Rows of the hot pages at which `entries` [B, K] int64 of the requests in `slots` [B, 1] are resident; -1 for
        those that are not and for entry -1."""
        if not self.resident.allocator.total:
            return torch.full_like(entries, -1)
        page = (entries.clamp(min=0) // C4_PAGE.rows).clamp(max=self._most_pages - 1)
        found = self._resident.flatten()[slots * self._most_pages + page].long()
        rows = (self._first_resident + found) * C4_PAGE.rows + entries % C4_PAGE.rows
        return torch.where((found >= 0) & (entries >= 0), rows, -1)

    def gather(self, layer: int, selected: Tensor, slots: Tensor, counts: Tensor, table: Tensor) -> Tensor:
        """Rows of selected entries [B, K] (-1 = none), [B, K, 512] fp32."""
        places = self.resolve(layer, selected, slots, counts, table)
        rows = self._kernels.unpack_rows(self._hot[layer].pages, places.flatten(), C4_PAGE)
        return rows.view(*selected.shape, -1)

    def release(self, slot: int) -> None:
        """The request is over; its tables are cleared so that no later one can hit its rows."""
        for hot in self._hot.values():
            hot.entries[slot] = -1
        self._on_host[slot] = 0
        self._resident[slot] = -1
        self.resident.release(slot)

    def check_integrity(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Raises ValueError unless each slot's recency is a permutation, its table names each of the request's
        `counts` entries at most once and no other, and the resident pages are what the device's table says."""
        self._check_resident()
        for layer, hot in self._hot.items():
            for slot, count in zip(slots, counts, strict=True):
                order = hot.recency[slot].sort().values.cpu()
                if not torch.equal(order, torch.arange(self.hot_entries, dtype=torch.int32)):
                    raise ValueError(f"layer {layer} slot {slot}: recency is no permutation of its rows")
                held = hot.entries[slot, : self.hot_entries]
                held = held[held >= 0]
                if held.unique().numel() != held.numel() or (held.numel() and int(held.max()) >= count):
                    raise ValueError(f"layer {layer} slot {slot}: table {held.tolist()} of {count} entries")

    def _check_resident(self) -> None:
        self.resident.check_integrity()
        table = self._resident.cpu()
        # What is not yet told to the table is told before the next step.
        for (slot, page), resident in self.resident.changes.items():
            table[slot, page] = resident
        for slot in range(self.slots.total):
            told = {page: int(table[slot, page]) for page in (table[slot] >= 0).nonzero().flatten().tolist()}
            if told != self.resident.pages_of(slot):
                raise ValueError(f"slot {slot}: resident pages {self.resident.pages_of(slot)}, the table says {told}")
