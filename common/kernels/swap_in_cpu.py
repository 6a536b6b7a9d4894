"""Swap-in in vectorised torch: the definition for other backends, see KVKernels.swap_in."""

from __future__ import annotations

import torch
from torch import Tensor

from common.kernels.interface import HostRows, HotState
from common.kernels.rows_cpu import transfer_rows
from common.kv.layout import C4_PAGE


def swap_in(selected: Tensor, slots: Tensor, counts: Tensor, host: HostRows, hot: HotState) -> Tensor:
    """Hits, misses and their order as `KVKernels.swap_in` says; misses are copied in address order."""
    check(selected, slots, counts, host, hot)
    active = slots >= 0
    wanted = (selected >= 0) & active[:, None]
    base = (slots * hot.rows_per_slot)[:, None]
    out = torch.where(wanted, base + selected, -1)
    fits = counts <= hot.hot_rows
    long = (active & ~fits).nonzero().flatten()
    if long.numel():
        out[long] = _swap_long(selected[long], slots[long], counts[long], host.table[long], host.pages, hot)
    hot.counters[0] += (wanted & fits[:, None]).sum()
    return out


def check(selected: Tensor, slots: Tensor, counts: Tensor, host: HostRows, hot: HotState) -> None:
    """Raises ValueError that names the argument, the index and its bound."""
    batch = selected.shape[0]
    for name, tensor in (("slots", slots), ("counts", counts), ("host table", host.table)):
        if tensor.shape[0] != batch:
            raise ValueError(f"swap_in: {name} has {tensor.shape[0]} rows, selected has {batch}")
    if selected.shape[1] > hot.hot_rows:
        raise ValueError(f"swap_in: {selected.shape[1]} selected entries do not fit {hot.hot_rows} hot rows")
    if batch == 0:
        return
    if int(slots.min()) < -1 or int(slots.max()) >= hot.entries.shape[0]:
        raise ValueError(f"swap_in: slots {slots.tolist()} are not all in [-1, {hot.entries.shape[0]})")
    taken = slots[slots >= 0]
    if taken.unique().numel() != taken.numel():
        raise ValueError(f"swap_in: slots {slots.tolist()} name a slot twice")
    over = selected >= counts[:, None]
    if bool(over.any()) or bool((selected < -1).any()):
        row = int((over | (selected < -1)).any(1).nonzero()[0])
        raise ValueError(f"swap_in: batch row {row} selects entries outside [-1, {int(counts[row])})")
    pages = -(-int(counts.max()) // C4_PAGE.rows)
    if pages > host.table.shape[1] and int(counts.max()) > hot.hot_rows:
        raise ValueError(
            f"swap_in: {int(counts.max())} entries need {pages} host pages, table has {host.table.shape[1]}"
        )


def _swap_long(
    selected: Tensor, slots: Tensor, counts: Tensor, table: Tensor, host_pages: Tensor, hot: HotState
) -> Tensor:
    hot_rows = hot.hot_rows
    wanted = selected >= 0
    newest = wanted & (selected == counts[:, None] - 1)
    searched = wanted & ~newest
    entries = hot.entries[slots, :hot_rows].long()
    hit, row = _find(entries, selected)
    hit &= searched
    # A miss that is selected twice is loaded once: only its first place counts.
    missed = searched & ~hit & _first_places(selected)

    hit_rows = torch.zeros(len(slots), hot_rows + 1, dtype=torch.bool)
    hit_rows.scatter_(1, torch.where(hit, row, hot_rows), True)
    recency = hot.recency[slots].long()
    is_hit = hit_rows.gather(1, recency)
    walked = recency.gather(1, is_hit.to(torch.int8).argsort(dim=1, stable=True))

    rank = missed.cumsum(1) - 1
    taken = walked.gather(1, rank.clamp(min=0))
    batch, place = missed.nonzero(as_tuple=True)
    loaded, target = selected[batch, place], taken[batch, place]
    host_page = table[batch, loaded // C4_PAGE.rows].long()
    if host_page.numel() and (int(host_page.min()) < 0 or int(host_page.max()) >= host_pages.shape[0]):
        bad = int(host_page.min()) if int(host_page.min()) < 0 else int(host_page.max())
        raise ValueError(f"swap_in: host page {bad} is not in [0, {host_pages.shape[0]})")
    host_places = host_page * C4_PAGE.rows + loaded % C4_PAGE.rows
    hot_places = slots[batch] * hot.rows_per_slot + target
    order = host_places.argsort()
    transfer_rows(host_pages, host_places[order], hot.pages, hot_places[order], C4_PAGE, C4_PAGE)

    entries[batch, target] = loaded
    hot.entries[slots, :hot_rows] = entries.to(torch.int32)
    misses = missed.sum(1, keepdim=True)
    unused = (~is_hit).sum(1, keepdim=True)
    at = torch.arange(hot_rows)
    group = torch.where(at < misses, 1, torch.where(at < unused, 0, 2))
    hot.recency[slots] = walked.gather(1, group.argsort(dim=1, stable=True)).to(torch.int32)

    hot.counters[0] += wanted.sum() - missed.sum()
    hot.counters[1] += missed.sum()
    _, row = _find(entries, selected)
    row = torch.where(newest, hot_rows, row)
    return torch.where(wanted, slots[:, None] * hot.rows_per_slot + row, -1)


def _find(entries: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each selected id [B, K] is among entries [B, D], and in which column (0 where it is not)."""
    ordered, column = entries.sort(dim=1)
    place = torch.searchsorted(ordered, selected).clamp(max=entries.shape[1] - 1)
    return ordered.gather(1, place) == selected, column.gather(1, place)


def _first_places(selected: Tensor) -> Tensor:
    """True where an id [B, K] appears for the first time in its row."""
    ordered, place = selected.sort(dim=1, stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(first).scatter_(1, place, first)
