"""Swap-in against a plain LRU written with Python lists."""

import random

import pytest
import torch

from common.kernels.cpu import cpu_kernels
from common.kernels.interface import HostRows, HotState
from common.kv.layout import C4_PAGE
from tests.unit.kernels.test_rows import row_bytes

KERNELS = cpu_kernels()


class Lru:
    """One slot: entries by row, rows from least to most recently used."""

    def __init__(self, hot_rows: int) -> None:
        self.entries = [-1] * hot_rows
        self.order = list(range(hot_rows))

    def step(self, selected: list[int], newest: int) -> None:
        wanted = [entry for entry in selected if entry >= 0 and entry != newest]
        hits = {self.entries.index(entry) for entry in wanted if entry in self.entries}
        evictable = [row for row in self.order if row not in hits]
        kept = [row for row in self.order if row in hits]
        missed = list(dict.fromkeys(entry for entry in wanted if entry not in self.entries))
        loaded = evictable[: len(missed)]
        for entry, row in zip(missed, loaded, strict=True):
            self.entries[row] = entry
        self.order = evictable[len(missed) :] + loaded + kept


def make_state(slots: int, hot_rows: int) -> HotState:
    pages = -(-(hot_rows + 1) // 64)
    return HotState(
        pages=torch.zeros(slots * pages, C4_PAGE.page_bytes, dtype=torch.uint8),
        entries=torch.full((slots, hot_rows + 1), -1, dtype=torch.int32),
        recency=torch.arange(hot_rows, dtype=torch.int32).repeat(slots, 1),
        counters=torch.zeros(2, dtype=torch.int64),
        rows_per_slot=pages * 64,
    )


@pytest.mark.parametrize(("hot_rows", "topk", "steps"), [(16, 16, 60), (20, 16, 60), (70, 8, 40), (4, 4, 80)])
def test_many_random_steps_equal_a_plain_lru(hot_rows: int, topk: int, steps: int):
    rng = random.Random(hot_rows * 100 + topk)
    slots, host_pages = 5, 12
    torch.manual_seed(hot_rows)
    host = torch.randint(0, 256, (host_pages, C4_PAGE.page_bytes), dtype=torch.uint8)
    hot = make_state(slots, hot_rows)
    table = torch.stack([torch.randperm(host_pages)[:4] for _ in range(slots)])
    plain = [Lru(hot_rows) for _ in range(slots)]
    misses = 0
    for _ in range(steps):
        batch = rng.sample(range(slots), rng.randint(1, slots))
        counts = [rng.randint(hot_rows + 1, 256) for _ in batch]
        selected = [[rng.randint(-1, min(count, hot_rows * 3) - 1) for _ in range(topk)] for count in counts]
        for row, count in enumerate(counts):
            if rng.random() < 0.5:
                selected[row][rng.randrange(topk)] = count - 1
        padded = [slot if rng.random() < 0.8 else -1 for slot in batch]
        out = KERNELS.swap_in(
            torch.tensor(selected), torch.tensor(padded), torch.tensor(counts),
            HostRows(host, table[[max(slot, 0) for slot in padded]]), hot,
        )  # fmt: skip
        for row, slot in enumerate(padded):
            if slot < 0:
                assert out[row].tolist() == [-1] * topk
                continue
            before = list(plain[slot].entries)
            plain[slot].step(selected[row], counts[row] - 1)
            misses += sum(a != b for a, b in zip(before, plain[slot].entries, strict=True))
            assert hot.entries[slot, :hot_rows].tolist() == plain[slot].entries
            assert hot.recency[slot].tolist() == plain[slot].order
            base = slot * hot.rows_per_slot
            for entry, place in zip(selected[row], out[row].tolist(), strict=True):
                if entry < 0:
                    assert place == -1
                elif entry == counts[row] - 1:
                    assert place == base + hot_rows
                else:
                    assert place == base + plain[slot].entries.index(entry)
                    host_place = int(table[slot, entry // 64]) * 64 + entry % 64
                    assert row_bytes(hot.pages, place, C4_PAGE) == row_bytes(host, host_place, C4_PAGE)
    assert misses > steps
    assert int(hot.counters[1]) == misses


@pytest.mark.parametrize("count", [1, 15, 16])
def test_a_sequence_that_fits_has_entry_t_at_row_t_and_moves_nothing(count: int):
    hot = make_state(2, 16)
    host = torch.ones(1, C4_PAGE.page_bytes, dtype=torch.uint8)
    selected = torch.tensor([[count - 1, 0, -1]])
    out = KERNELS.swap_in(selected, torch.tensor([1]), torch.tensor([count]), HostRows(host, torch.tensor([[0]])), hot)
    assert out.tolist() == [[64 + count - 1, 64, -1]]
    assert hot.pages.sum() == 0
    assert hot.counters.tolist() == [2, 0]


def test_a_padding_row_between_real_ones_touches_no_recency():
    hot = make_state(3, 4)
    before = hot.recency.clone()
    host = torch.zeros(4, C4_PAGE.page_bytes, dtype=torch.uint8)
    KERNELS.swap_in(
        torch.tensor([[1, 2], [3, 0]]), torch.tensor([-1, 1]), torch.tensor([200, 200]),
        HostRows(host, torch.tensor([[0, 1, 2, 3]] * 2)), hot,
    )  # fmt: skip
    assert torch.equal(hot.recency[[0, 2]], before[[0, 2]])
    assert not torch.equal(hot.recency[1], before[1])


@pytest.mark.parametrize(
    ("selected", "slots", "counts", "message"),
    [
        ([[5]], [0], [5], r"batch row 0 selects entries outside \[-1, 5\)"),
        ([[-2]], [0], [5], r"selects entries outside"),
        ([[0]], [2], [5], r"not all in \[-1, 2\)"),
        ([[0]], [-2], [5], r"not all in"),
        ([[0] * 5], [0], [5], "do not fit 4 hot rows"),
        ([[0], [0]], [0], [5, 5], "slots has 1 rows, selected has 2"),
        ([[0], [0]], [1, 1], [5, 5], r"slots \[1, 1\] name a slot twice"),
        ([[0]], [0], [200], "need 4 host pages, table has 1"),
    ],
)
def test_hostile_arguments_are_refused(selected: list[list[int]], slots: list[int], counts: list[int], message: str):
    hot = make_state(2, 4)
    host = HostRows(
        torch.zeros(1, C4_PAGE.page_bytes, dtype=torch.uint8), torch.zeros(len(selected), 1, dtype=torch.int64)
    )
    with pytest.raises(ValueError, match=message):
        KERNELS.swap_in(torch.tensor(selected), torch.tensor(slots), torch.tensor(counts), host, hot)


def test_a_host_page_that_is_not_there_is_refused_and_no_state_changes():
    hot = make_state(2, 4)
    before = [tensor.clone() for tensor in (hot.entries, hot.recency, hot.counters, hot.pages)]
    host = HostRows(torch.zeros(2, C4_PAGE.page_bytes, dtype=torch.uint8), torch.tensor([[0, 0], [0, 2]]))
    with pytest.raises(ValueError, match=r"swap_in: host page 2 is not in \[0, 2\)"):
        KERNELS.swap_in(torch.tensor([[1], [64]]), torch.tensor([0, 1]), torch.tensor([4, 100]), host, hot)
    for tensor, old in zip((hot.entries, hot.recency, hot.counters, hot.pages), before, strict=True):
        assert torch.equal(tensor, old)
