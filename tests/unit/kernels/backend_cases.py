"""Cases that compare a backend with the cpu definition, byte for byte. The same for the emulated and the real GPU."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.kernels.cpu import cpu_kernels
from common.kernels.cuda_backend import CudaKernels
from common.kernels.interface import HostRows, HotState
from common.kv.layout import C4_PAGE, C128_PAGE, INDEX_PAGE, WINDOW_PAGE, PageLayout

CPU = cpu_kernels()
ROW_LAYOUTS = (C4_PAGE, C128_PAGE, WINDOW_PAGE)


@dataclass(frozen=True)
class Backend:
    """The kernels under test, how a tensor gets to their device and into memory that stands for the host."""

    kernels: CudaKernels
    to_device: Callable[[torch.Tensor], torch.Tensor]
    to_host: Callable[[torch.Tensor], torch.Tensor]


def random_pages(pages: int, layout: PageLayout, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (pages, layout.page_bytes), dtype=torch.uint8, generator=generator)


def hard_rows(count: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Sizes from 1e-6 to 1e6, zeros, signed zeros, exact powers of two and values halfway between two fp8 steps."""
    rows = torch.randn(count, width, generator=generator)
    powers = torch.rand(count, width // 64, generator=generator) * 12 - 6
    rows *= 10.0 ** powers.repeat_interleave(64, 1)
    rows[:, ::7] = rows[:, ::7].bfloat16().float()
    rows[0] = 0.0
    rows[1] = -0.0
    rows[2] = 2.0 ** torch.randint(-20, 20, (width,), generator=generator).float()
    rows[3] = torch.arange(width) % 64 + 0.5
    rows[4, :64] = torch.arange(64) / 4096  # the subnormal steps of a block whose largest is 1
    rows[4, 0] = 1.0
    return rows


def check_pack_and_unpack(backend: Backend, layout: PageLayout, dtype: torch.dtype, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pages = -(-count * 3 // layout.rows)
    rows = hard_rows(count, 512, generator).to(dtype)
    places = torch.randperm(pages * layout.rows, generator=generator)[:count]
    expected = random_pages(pages, layout, generator)
    found = backend.to_device(expected.clone())
    CPU.pack_rows(rows, expected, places, layout)
    backend.kernels.pack_rows(backend.to_device(rows), found, backend.to_device(places), layout)
    assert torch.equal(found.cpu(), expected)
    asked = places.clone()
    asked[::5] = -1
    values = backend.kernels.unpack_rows(found, backend.to_device(asked), layout)
    assert torch.equal(values.cpu(), CPU.unpack_rows(expected, asked, layout))


def check_index_keys(backend: Backend, dtype: torch.dtype, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pages = -(-count * 2 // INDEX_PAGE.rows)
    keys = hard_rows(count, 128, generator).to(dtype)
    places = torch.randperm(pages * INDEX_PAGE.rows, generator=generator)[:count]
    expected = torch.zeros(pages, INDEX_PAGE.page_bytes, dtype=torch.uint8)
    CPU.pack_index_keys(torch.randn(len(expected) * 64, 128, generator=generator), expected, torch.arange(pages * 64))
    found = backend.to_device(expected.clone())
    CPU.pack_index_keys(keys, expected, places)
    backend.kernels.pack_index_keys(backend.to_device(keys), found, backend.to_device(places))
    assert torch.equal(found.cpu(), expected)
    ids = torch.randperm(pages, generator=generator)
    unpacked = backend.kernels.unpack_index_pages(found, backend.to_device(ids))
    assert torch.equal(unpacked.cpu(), CPU.unpack_index_pages(expected, ids))


def check_transfer(
    backend: Backend, source_layout: PageLayout, target_layout: PageLayout, count: int, layers: int, seed: int
) -> None:
    """Rows of several layers at once, host to device; what is not a target row stays as it was."""
    generator = torch.Generator().manual_seed(seed)
    source_pages = -(-count * 2 // source_layout.rows)
    target_pages = -(-count * 2 // target_layout.rows)
    from_places = torch.randperm(source_pages * source_layout.rows, generator=generator)[:count]
    to_places = torch.randperm(target_pages * target_layout.rows, generator=generator)[:count]
    sources = [random_pages(source_pages, source_layout, generator) for _ in range(layers)]
    expected = [random_pages(target_pages, target_layout, generator) for _ in range(layers)]
    found = [backend.to_device(target.clone()) for target in expected]
    for source, target in zip(sources, expected, strict=True):
        CPU.transfer_rows(source, from_places, target, to_places, source_layout, target_layout)
    backend.kernels.transfer_layers(
        [backend.to_host(source) for source in sources], backend.to_device(from_places),
        found, backend.to_device(to_places), source_layout, target_layout,
    )  # fmt: skip
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.cpu(), b)


def check_page_transfer(backend: Backend, layout: PageLayout, seed: int) -> None:
    """Whole pages, rows and a mixture in one list; the bytes behind a page's rows have no meaning and may differ."""
    generator = torch.Generator().manual_seed(seed)
    inside = torch.arange(64)
    source, target = random_pages(7, layout, generator), random_pages(7, layout, generator)
    # A page; a page's rows out of order; rows one off; a page again; part of a page.
    from_places = torch.cat(
        [64 * 2 + inside, 64 * 3 + inside.flip(0), 1 + inside, 64 * 5 + inside, 64 * 6 + inside[:9]]
    )
    to_places = torch.cat([64 * 4 + inside, 64 * 2 + inside, 64 * 5 + inside, inside, 64 * 6 + inside[:9]])
    found = backend.to_device(target.clone())
    CPU.transfer_rows(source, from_places, target, to_places, layout, layout)
    backend.kernels.transfer_rows(
        backend.to_host(source), backend.to_device(from_places), found, backend.to_device(to_places), layout, layout
    )
    used = layout.rows * (layout.data_bytes + layout.scale_bytes)
    assert torch.equal(found.cpu()[:, :used], target[:, :used])


@dataclass(frozen=True)
class SwapCase:
    slots: int
    hot_rows: int
    topk: int
    most_entries: int
    host_pages: int
    wide_table: bool


def check_swap_in_steps(backend: Backend, case: SwapCase, steps: int, seed: int) -> int:
    """Random steps of both backends side by side: same rows, state, bytes and counters. Returns the misses."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    host = random_pages(case.host_pages, C4_PAGE, generator)
    host_there = backend.to_host(host)
    pages = -(-(case.hot_rows + 1) // 64)
    expected = HotState(
        pages=random_pages(case.slots * pages, C4_PAGE, generator),
        entries=torch.full((case.slots, case.hot_rows + 1), -1, dtype=torch.int32),
        recency=torch.arange(case.hot_rows, dtype=torch.int32).repeat(case.slots, 1),
        counters=torch.zeros(2, dtype=torch.int64),
        rows_per_slot=pages * 64,
    )
    found = HotState(
        *[
            backend.to_device(t.clone())
            for t in (expected.pages, expected.entries, expected.recency, expected.counters)
        ],
        rows_per_slot=pages * 64,
    )
    table_pages = -(-case.most_entries // 64)
    tables = torch.stack(
        [torch.randperm(case.host_pages, generator=generator)[:table_pages] for _ in range(case.slots)]
    )
    tables = tables.to(torch.int64 if case.wide_table else torch.int32)
    for step in range(steps):
        batch = rng.sample(range(case.slots), rng.randint(1, case.slots))
        slots = [slot if rng.random() < 0.85 else -1 for slot in batch]
        counts = [_count(rng, case) for _ in batch]
        selected = torch.tensor([_selection(rng, case.topk, count) for count in counts])
        table = tables[[max(slot, 0) for slot in slots]]
        question = (selected, torch.tensor(slots), torch.tensor(counts))
        rows = CPU.swap_in(*question, HostRows(host, table), expected)
        rows_found = backend.kernels.swap_in(
            *[backend.to_device(t) for t in question], HostRows(host_there, backend.to_device(table)), found
        )
        assert torch.equal(rows_found.cpu(), rows), step
        assert torch.equal(found.entries.cpu(), expected.entries), step
        assert torch.equal(found.recency.cpu(), expected.recency), step
        assert torch.equal(found.counters.cpu(), expected.counters), step
        if step % 16 == 0 or step == steps - 1:
            assert torch.equal(found.pages.cpu(), expected.pages), step
    return int(expected.counters[1])


def _count(rng: random.Random, case: SwapCase) -> int:
    around = rng.choice([case.hot_rows - 1, case.hot_rows, case.hot_rows + 1, case.hot_rows + 2, case.most_entries])
    return max(1, min(rng.choice([around, rng.randint(1, case.most_entries)]), case.most_entries))


def _selection(rng: random.Random, topk: int, count: int) -> list[int]:
    """Mostly recent entries, so that some hit; duplicates, -1 and the newest entry among them."""
    span = rng.choice([count, max(1, count // 3)])
    chosen = [rng.randint(count - span, count - 1) for _ in range(topk)]
    for _ in range(rng.randint(0, 2) if topk > 1 else 0):
        chosen[rng.randrange(topk)] = -1
    if rng.random() < 0.5:
        chosen[rng.randrange(topk)] = count - 1
    if topk > 1 and rng.random() < 0.5:
        chosen[rng.randrange(topk)] = chosen[rng.randrange(topk)]
    return chosen
