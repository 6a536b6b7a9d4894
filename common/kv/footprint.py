"""Bytes of what a request holds, by pool: the one place that sizes pools, prints start-up limits and plans machines."""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.layout import (
    C4_PAGE,
    C128_PAGE,
    INDEX_PAGE,
    STATE_C4_ROWS,
    STATE_C4_WIDTH,
    STATE_C128_ROWS,
    STATE_C128_WIDTH,
    STATE_INDEX_ROWS,
    STATE_INDEX_WIDTH,
    WINDOW_PAGE,
    host_page_count,
    logical_page_count,
)

FP32_BYTES = 4
INT32_BYTES = 4
INT64_BYTES = 8


@dataclass(frozen=True)
class Footprint:
    """Bytes of one page or slot id, over all layers. host_page: 64 C4 entries on the host (256 tokens); logical_page:
    256 tokens of index keys and C128 rows on the device; window, state, hot: slots of a request on the device;
    hot_table: which entries the hot slot has, and their order; shared: what the device has once, whatever the number of
    requests: the state and hot slot of padding rows, and counters."""

    host_page: int
    logical_page: int
    window_slot: int
    state_slot: int
    hot_slot: int
    hot_table: int
    shared: int

    @classmethod
    def of(cls, ratios: tuple[int, ...], hot_entries: int) -> Footprint:
        """`ratios` of the layers (0, 4, 128), `hot_entries` is D."""
        c4, c128 = ratios.count(4), ratios.count(128)
        hot_pages = -(-(hot_entries + 1) // C4_PAGE.rows)
        c4_state = STATE_C4_ROWS * STATE_C4_WIDTH + STATE_INDEX_ROWS * STATE_INDEX_WIDTH
        state_slot = FP32_BYTES * (c4 * c4_state + c128 * STATE_C128_ROWS * STATE_C128_WIDTH)
        hot_slot = c4 * hot_pages * C4_PAGE.page_bytes
        # Per layer entries [D + 1] and recency [D]; how many entries the host has, once.
        hot_table = c4 * INT32_BYTES * (2 * hot_entries + 1) + INT64_BYTES
        return cls(
            host_page=c4 * C4_PAGE.page_bytes,
            logical_page=c4 * INDEX_PAGE.page_bytes + c128 * C128_PAGE.page_bytes,
            window_slot=len(ratios) * WINDOW_PAGE.page_bytes,
            state_slot=state_slot,
            hot_slot=hot_slot,
            hot_table=hot_table,
            shared=state_slot + hot_slot + hot_table + (c4 + 1) * 2 * INT64_BYTES,
        )

    @property
    def slots(self) -> int:
        """Device bytes of a request whatever its length."""
        return self.window_slot + self.state_slot + self.hot_slot + self.hot_table

    def host_bytes(self, tokens: int) -> int:
        return host_page_count(tokens) * self.host_page

    def device_bytes(self, tokens: int) -> int:
        """Of a request of `tokens` tokens with HiSparse; `shared` comes once beside all of them."""
        return self.slots + logical_page_count(tokens) * self.logical_page

    def resident_bytes(self, tokens: int) -> int:
        """Device bytes of the same request without HiSparse: all C4 rows on the device, no hot buffer."""
        return self.device_bytes(tokens) - self.hot_slot - self.hot_table + self.host_bytes(tokens)

    def most_requests(self, tokens: int, host_budget: int, device_budget: int) -> int:
        """Requests of `tokens` tokens that fit both budgets (bytes)."""
        pages = host_page_count(tokens)
        by_host = host_budget // self.host_page // pages if pages and self.host_page else 1 << 62
        return min(by_host, max(0, device_budget - self.shared) // self.device_bytes(tokens))

    def most_resident(self, tokens: int, device_budget: int) -> int:
        """Requests of `tokens` tokens that fit the device without HiSparse."""
        return device_budget // self.resident_bytes(tokens)
