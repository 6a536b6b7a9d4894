"""The cuda backend on a GPU: the same cases as the emulated kernels, at sizes that only a GPU does in time."""

import importlib.util
import random

import pytest
import torch

from common.kernels.cuda_backend import CudaKernels
from common.kernels.cuda_launch import CupyLauncher
from common.kernels.interface import HostRows, HotState
from common.kv.layout import C4_PAGE, C128_PAGE, INDEX_PAGE, WINDOW_PAGE, PageLayout
from tests.unit.kernels.backend_cases import (
    ROW_LAYOUTS,
    Backend,
    SwapCase,
    check_index_keys,
    check_pack_and_unpack,
    check_page_transfer,
    check_swap_in_steps,
    check_transfer,
)
from tests.unit.kernels.test_swap_in import Lru

if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
if importlib.util.find_spec("cupy") is None:
    pytest.skip("cupy is not installed (extras cuda12, cuda13)", allow_module_level=True)

pytestmark = pytest.mark.gpu


def gpu(*, strict: bool = True, split_up_to: int = 8) -> Backend:
    kernels = CudaKernels(CupyLauncher(torch.device("cuda")), strict=strict, split_up_to=split_up_to)
    return Backend(kernels, lambda tensor: tensor.cuda(), lambda tensor: tensor.pin_memory())


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [7, 262_144])
def test_packed_bytes_and_unpacked_values_are_the_definitions(layout: PageLayout, dtype: torch.dtype, count: int):
    check_pack_and_unpack(gpu(), layout, dtype, count, seed=count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_keys_are_the_definitions(dtype: torch.dtype):
    check_index_keys(gpu(), dtype, count=100_000, seed=1)


@pytest.mark.parametrize("source", [C4_PAGE, C128_PAGE, WINDOW_PAGE])
@pytest.mark.parametrize("target", [C4_PAGE, C128_PAGE, WINDOW_PAGE])
def test_rows_of_all_layers_move_between_layouts(source: PageLayout, target: PageLayout):
    check_transfer(gpu(), source, target, count=10_001, layers=5, seed=2)


def test_index_keys_move():
    check_transfer(gpu(), INDEX_PAGE, INDEX_PAGE, count=10_001, layers=5, seed=3)


@pytest.mark.parametrize("layout", [C4_PAGE, INDEX_PAGE])
def test_whole_pages_and_rows_in_one_list(layout: PageLayout):
    check_page_transfer(gpu(), layout, seed=6)


@pytest.mark.parametrize("split_up_to", [0, 512])
@pytest.mark.parametrize(
    "case",
    [
        SwapCase(slots=512, hot_rows=1024, topk=512, most_entries=4096, host_pages=600, wide_table=True),
        SwapCase(slots=33, hot_rows=4096, topk=2048, most_entries=262_144, host_pages=4200, wide_table=False),
        SwapCase(slots=64, hot_rows=16, topk=16, most_entries=200, host_pages=9, wide_table=True),
    ],
)
def test_swap_in_steps_equal_the_definition(case: SwapCase, split_up_to: int):
    assert check_swap_in_steps(gpu(split_up_to=split_up_to), case, steps=20, seed=case.hot_rows) > 0


@pytest.mark.slow
@pytest.mark.parametrize("split_up_to", [0, 8])
def test_100_000_random_steps_equal_a_plain_lru(split_up_to: int):
    rng = random.Random(9)
    hot_rows, topk, entries = 20, 16, 200
    backend = gpu(strict=False, split_up_to=split_up_to)
    generator = torch.Generator().manual_seed(9)
    host_pages = torch.randint(0, 256, (4, C4_PAGE.page_bytes), dtype=torch.uint8, generator=generator)
    host = HostRows(backend.to_host(host_pages), torch.tensor([[3, 1, 0, 2]]).cuda())
    hot = HotState(
        torch.zeros(1, C4_PAGE.page_bytes, dtype=torch.uint8).cuda(),
        torch.full((1, hot_rows + 1), -1, dtype=torch.int32).cuda(),
        torch.arange(hot_rows, dtype=torch.int32)[None].cuda(),
        torch.zeros(2, dtype=torch.int64).cuda(),
        64,
    )
    plain = Lru(hot_rows)
    slot = torch.tensor([0]).cuda()
    steps = 100_000
    counts = [rng.randint(hot_rows + 1, entries) for _ in range(steps)]
    selections = [[rng.randint(-1, min(count, 60) - 1) for _ in range(topk)] for count in counts]
    selected_there, counts_there = torch.tensor(selections).cuda(), torch.tensor(counts).cuda()
    for step in range(steps):
        backend.kernels.swap_in(selected_there[step : step + 1], slot, counts_there[step : step + 1], host, hot)
        plain.step(selections[step], counts[step] - 1)
        if step % 100 == 0 or step == steps - 1:
            assert hot.entries[0, :hot_rows].tolist() == plain.entries, step
            assert hot.recency[0].tolist() == plain.order, step
    backend.kernels.check_faults()


def test_a_step_is_captured_in_a_graph_and_replayed():
    backend = gpu(strict=False)
    case = 1024, 512
    host = HostRows(
        torch.randint(0, 256, (64, C4_PAGE.page_bytes), dtype=torch.uint8).pin_memory(),
        torch.arange(64).repeat(4, 1).cuda(),
    )
    hot = HotState(
        torch.zeros(4 * 17, C4_PAGE.page_bytes, dtype=torch.uint8).cuda(),
        torch.full((4, case[0] + 1), -1, dtype=torch.int32).cuda(),
        torch.arange(case[0], dtype=torch.int32).repeat(4, 1).cuda(),
        torch.zeros(2, dtype=torch.int64).cuda(),
        17 * 64,
    )
    selected = torch.stack([torch.randperm(4000)[: case[1]] for _ in range(4)]).cuda()
    slots, counts = torch.tensor([2, -1, 0, 1]).cuda(), torch.full((4,), 4096).cuda()
    backend.kernels.swap_in(selected, torch.full_like(slots, -1), counts, host, hot)  # compiles, touches nothing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.kernels.swap_in(selected, slots, counts, host, hot)
    graph.replay()
    torch.cuda.synchronize()
    assert hot.counters.tolist() == [0, 3 * case[1]]
    assert bool((out[1] == -1).all())
    rows = backend.kernels.unpack_rows(hot.pages, out[0], C4_PAGE)
    expected = backend.kernels.unpack_rows(host.pages, selected[0], C4_PAGE)
    # Random bytes have NaN among their rope values.
    assert torch.equal(rows.view(torch.int32), expected.view(torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    assert hot.counters.tolist() == [3 * case[1], 3 * case[1]]
    backend.kernels.check_faults()


def test_pageable_host_memory_is_refused():
    pages = torch.zeros(1, C4_PAGE.page_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="pageable memory"):
        gpu().kernels.unpack_rows(pages, torch.tensor([0]).cuda(), C4_PAGE)


@pytest.mark.parametrize("bad", [-2, 128, 2**40])
def test_wrong_rows_are_left_out_and_reported(bad: int):
    kernels = gpu(strict=False).kernels
    pages = torch.zeros(2, C4_PAGE.page_bytes, dtype=torch.uint8).cuda()
    kernels.pack_rows(torch.ones(2, 512).cuda(), pages, torch.tensor([1, bad]).cuda(), C4_PAGE)
    with pytest.raises(ValueError, match=rf"target row {bad} \(place 1 of the list\) is not in \[0, 128\)"):
        kernels.check_faults()
