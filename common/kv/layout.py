"""Rows, pages and pools: the one place for their arithmetic.

A row (one token or one compressed entry) is 448 fp8 values, 64 bf16 values and 8 scale bytes. A page keeps the
data of its rows first, then their scales, padded to a multiple of the data size:

    data(i)  = i * 576                      page_bytes = ceil(rows * 584 / 576) * 576
    scale(i) = rows * 576 + i * 8

So a page is contiguous but a row is two pieces. An index key page is 64 keys of 128 fp8 values, then 64 fp32
scales. Source: the "V4" fp8 layout of sparse MLA decode kernels for head dimension 512.
"""

from __future__ import annotations

from dataclasses import dataclass

NOPE_VALUES = 448
ROPE_VALUES = 64
ROW_VALUES = NOPE_VALUES + ROPE_VALUES
SCALE_BLOCK = 64
DATA_BYTES = NOPE_VALUES + 2 * ROPE_VALUES
SCALE_BYTES = 8
INDEX_VALUES = 128
LOGICAL_PAGE_TOKENS = 256
WINDOW_TOKENS = 128


@dataclass(frozen=True)
class PageLayout:
    """A page of `rows` rows, each `data_bytes` of data and, behind all data, `scale_bytes` of scales."""

    rows: int
    data_bytes: int
    scale_bytes: int
    page_bytes: int

    @property
    def scale_offset(self) -> int:
        return self.rows * self.data_bytes

    def pieces(self, first: int, count: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Byte runs (offset, length) inside the page of rows first ... first+count-1: data, scales.

        Raises ValueError when they aren't all inside the page.
        """
        if first < 0 or count < 1 or first + count > self.rows:
            raise ValueError(f"rows {first} ... {first + count - 1} are not inside a page of {self.rows}")
        return (
            (first * self.data_bytes, count * self.data_bytes),
            (self.scale_offset + first * self.scale_bytes, count * self.scale_bytes),
        )


def row_page(rows: int) -> PageLayout:
    """The layout of a page of `rows` fp8 rows."""
    used = rows * (DATA_BYTES + SCALE_BYTES)
    return PageLayout(rows, DATA_BYTES, SCALE_BYTES, -(-used // DATA_BYTES) * DATA_BYTES)


C4_PAGE = row_page(64)
C128_PAGE = row_page(2)
WINDOW_PAGE = row_page(256)
INDEX_PAGE = PageLayout(64, INDEX_VALUES, 4, 64 * (INDEX_VALUES + 4))

# fp32 rows a slot and their width in values, see common.model.kv_store.
STATE_C4_ROWS, STATE_C4_WIDTH = 8, 4 * ROW_VALUES
STATE_INDEX_ROWS, STATE_INDEX_WIDTH = 8, 4 * INDEX_VALUES
STATE_C128_ROWS, STATE_C128_WIDTH = 128, 2 * ROW_VALUES


def entry_count(tokens: int, ratio: int) -> int:
    """Complete compressed entries of a sequence of `tokens` tokens."""
    return tokens // ratio


def host_token_len(tokens: int) -> int:
    """C4 entries of a sequence, which are what the host pool counts in."""
    return tokens // 4


def host_page_count(tokens: int) -> int:
    """Host pages that hold the C4 entries of `tokens` tokens; also the number of index key pages."""
    return -(-host_token_len(tokens) // C4_PAGE.rows)


def logical_page_count(tokens: int) -> int:
    return -(-tokens // LOGICAL_PAGE_TOKENS)


def c128_page_count(tokens: int) -> int:
    return -(-entry_count(tokens, 128) // C128_PAGE.rows)
