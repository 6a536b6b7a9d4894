"""What every backend does with KV bytes. Tensors live on the backend's device; rows of a buffer of pages are
numbered through: row r is row r % layout.rows of page r // layout.rows. Wrong indices are a ValueError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.kv.layout import PageLayout


@dataclass(frozen=True)
class HotState:
    """Hot buffers of one C4 layer. Rows of slot s begin at row s * rows_per_slot of `pages`.

    pages [n, page_bytes] uint8; entries [slots, D + 1] int32: which entry each row holds, -1 = none, the last
    one being the newest-entry row; recency [slots, D] int32: rows 0 ... D-1, least recently used first;
    counters [2] int64: hits and misses so far.
    """

    pages: Tensor
    entries: Tensor
    recency: Tensor
    counters: Tensor
    rows_per_slot: int

    @property
    def hot_rows(self) -> int:
        """D, the rows in recency order."""
        return self.recency.shape[1]


@dataclass(frozen=True)
class HostRows:
    """Where the entries of a batch lie on the host: entry e of batch row b is row
    table[b, e // 64] * 64 + e % 64 of pages. pages [n, page_bytes] uint8, table [B, pages] int64 or int32."""

    pages: Tensor
    table: Tensor


class KVKernels(Protocol):
    """Source of the algorithms: HiSparse (host-resident sparse KV with a device hot buffer)."""

    def check_faults(self) -> None:
        """Raises ValueError for the first wrong index or value that a backend found after its call had returned."""
        ...

    def pack_rows(self, rows: Tensor, pages: Tensor, places: Tensor, layout: PageLayout) -> None:
        """Quantises rows [n, 512] and writes them at rows `places` [n] int64 of `pages`; a place of -1
        leaves its row out."""
        ...

    def unpack_rows(self, pages: Tensor, places: Tensor, layout: PageLayout) -> Tensor:
        """Rows `places` [n] int64 of `pages`, dequantised, [n, 512] fp32; zeros where a place is -1."""
        ...

    def pack_index_keys(self, keys: Tensor, pages: Tensor, places: Tensor) -> None:
        """Rotates and quantises keys [n, 128] and writes them at `places` [n] int64 of index pages; -1 as above."""
        ...

    def unpack_index_pages(self, pages: Tensor, page_ids: Tensor) -> Tensor:
        """Whole index pages `page_ids` [n] int64 as keys in the rotated basis, [n * 64, 128] fp32."""
        ...

    def transfer_rows(
        self,
        source: Tensor,
        source_places: Tensor,
        target: Tensor,
        target_places: Tensor,
        source_layout: PageLayout,
        target_layout: PageLayout,
    ) -> None:
        """Copies rows byte by byte between page-split buffers; both place lists [n] int64 must be equally long, and
        -1 in either leaves the row out.
        (`transfer_cache_dsv4_mla`.) Whole aligned pages go as pages."""
        ...

    def swap_in(self, selected: Tensor, slots: Tensor, counts: Tensor, host: HostRows, hot: HotState) -> Tensor:
        """Makes the selected entries of a batch resident and says where.

        selected [B, K] int64 entry ids, -1 = none, duplicates allowed; slots [B] int64, -1 = padding row (its
        output is -1 and no state is touched), otherwise distinct; counts [B] int64: complete entries of each
        sequence, the newest included. Returns rows of hot.pages, [B, K] int64, -1 for none.

        A sequence with counts <= D holds entry e at row e of its slot. Otherwise entry counts-1 is at the
        newest-entry row; a hit keeps its row; the m-th miss, in the order of `selected`, takes the m-th least
        recently used row that is no hit. The new order is: rows left unused, rows just loaded, hits.
        """
        ...
