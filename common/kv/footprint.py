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


@dataclass(frozen=True)
class Footprint:
    """Of one page or slot id, over all layers. host_page: 64 C4 entries on the host (256 tokens); logical_page: 256
    tokens of index keys and C128 rows on the device; window, state, hot: slots of a request on the device."""

    host_page: int
    logical_page: int
    window_slot: int
    state_slot: int
    hot_slot: int

    @classmethod
    def of(cls, ratios: tuple[int, ...], hot_entries: int) -> Footprint:
        """`ratios` of the layers (0, 4, 128), `hot_entries` is D."""
        c4, c128 = ratios.count(4), ratios.count(128)
        hot_pages = -(-(hot_entries + 1) // C4_PAGE.rows)
        c4_state = STATE_C4_ROWS * STATE_C4_WIDTH + STATE_INDEX_ROWS * STATE_INDEX_WIDTH
        return cls(
            host_page=c4 * C4_PAGE.page_bytes,
            logical_page=c4 * INDEX_PAGE.page_bytes + c128 * C128_PAGE.page_bytes,
            window_slot=len(ratios) * WINDOW_PAGE.page_bytes,
            state_slot=FP32_BYTES * (c4 * c4_state + c128 * STATE_C128_ROWS * STATE_C128_WIDTH),
            hot_slot=c4 * hot_pages * C4_PAGE.page_bytes,
        )

    @property
    def slots(self) -> int:
        """Device bytes of a request whatever its length."""
        return self.window_slot + self.state_slot + self.hot_slot

    def host_bytes(self, tokens: int) -> int:
        return host_page_count(tokens) * self.host_page

    def device_bytes(self, tokens: int) -> int:
        """Of a request of `tokens` tokens with HiSparse."""
        return self.slots + logical_page_count(tokens) * self.logical_page

    def resident_bytes(self, tokens: int) -> int:
        """Device bytes of the same request without HiSparse: all C4 rows on the device, no hot buffer."""
        return self.device_bytes(tokens) - self.hot_slot + self.host_bytes(tokens)

    def most_requests(self, tokens: int, host_budget: int, device_budget: int) -> int:
        """Requests of `tokens` tokens that fit both budgets (bytes)."""
        host = self.host_bytes(tokens)
        by_host = host_budget // host if host else 1 << 62
        return min(by_host, device_budget // self.device_bytes(tokens))
