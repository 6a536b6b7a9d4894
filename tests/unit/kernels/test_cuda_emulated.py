"""The CUDA kernels, run on the CPU thread by thread, against the cpu definition. What only a GPU can show (memory
spaces, speed, races between warps in weak memory) is in tests/gpu."""

import faulthandler
import multiprocessing

import pytest
import torch

from common.kernels.cuda_backend import CudaKernels
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
from tests.unit.kernels.emulated import EmulatedLauncher

SMALL = SwapCase(slots=3, hot_rows=20, topk=16, most_entries=200, host_pages=9, wide_table=True)


def ten_steps(backend: Backend) -> None:
    """For a process of its own, whose crash is an answer and needs no trace."""
    faulthandler.disable()
    check_swap_in_steps(backend, SMALL, steps=10, seed=20)


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def emulated(seed: int = 1, *, strict: bool = True, split_up_to: int = 8, edit=None, edited: str = "") -> Backend:
    launcher = EmulatedLauncher(seed, edit, edited)
    return Backend(CudaKernels(launcher, strict=strict, split_up_to=split_up_to), same, same)


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_bytes_and_unpacked_values_are_the_definitions(layout: PageLayout, dtype: torch.dtype):
    check_pack_and_unpack(emulated(), layout, dtype, count=150, seed=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_keys_are_the_definitions(dtype: torch.dtype):
    check_index_keys(emulated(), dtype, count=90, seed=4)


@pytest.mark.parametrize(
    ("source", "target", "count"),
    [
        (C4_PAGE, C4_PAGE, 70),
        (C4_PAGE, C128_PAGE, 33),
        (C128_PAGE, WINDOW_PAGE, 64),
        (WINDOW_PAGE, C4_PAGE, 1),
        (INDEX_PAGE, INDEX_PAGE, 67),
    ],
)
def test_rows_of_all_layers_move_between_layouts(source: PageLayout, target: PageLayout, count: int):
    check_transfer(emulated(), source, target, count, layers=3, seed=count)


@pytest.mark.parametrize("layout", [C4_PAGE, INDEX_PAGE])
def test_whole_pages_and_rows_in_one_list(layout: PageLayout):
    check_page_transfer(emulated(), layout, seed=6)


@pytest.mark.parametrize("split_up_to", [0, 8])
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        SwapCase(slots=2, hot_rows=4, topk=4, most_entries=64, host_pages=3, wide_table=False),
        SwapCase(slots=2, hot_rows=1, topk=1, most_entries=64, host_pages=2, wide_table=True),
        SwapCase(slots=2, hot_rows=96, topk=64, most_entries=700, host_pages=600, wide_table=False),
    ],
)
def test_swap_in_steps_equal_the_definition(case: SwapCase, split_up_to: int):
    assert check_swap_in_steps(emulated(split_up_to=split_up_to), case, steps=8, seed=case.hot_rows) > 4


def test_swap_in_does_more_rows_than_a_block_has_threads():
    case = SwapCase(slots=1, hot_rows=1100, topk=1050, most_entries=3000, host_pages=50, wide_table=True)
    assert check_swap_in_steps(emulated(), case, steps=4, seed=5) > 1050


def test_the_order_in_which_threads_run_changes_nothing():
    for seed in range(2, 8):
        check_swap_in_steps(emulated(seed * 1000), SMALL, steps=3, seed=1)


def test_small_batches_split_and_large_ones_do_not():
    backend = emulated(split_up_to=1)
    check_swap_in_steps(backend, SMALL, steps=12, seed=2)
    launcher = backend.kernels._launcher
    assert isinstance(launcher, EmulatedLauncher)
    assert {"swap_in_fused", "swap_in_resolve", "swap_in_copy"} == set(launcher.launches)
    assert launcher.launches.count("swap_in_resolve") == launcher.launches.count("swap_in_copy")


BREAKAGES = [
    # Each is a mistake that was, or could easily be, made; the cases above must notice it.
    ("swap_in", "hash.first[cell] == k && ", ""),
    ("swap_in", "at < unused - misses ? misses + at", "at < unused ? at"),
    ("swap_in", "(entry == count - 1 ? D : hash.rows[hash.find((int)entry)])", "hash.rows[hash.find((int)entry)]"),
    (
        "swap_in",
        "order[cell >= 0 ? D - 1 - before : at - before] = row",
        "order[cell >= 0 ? D - 1 - before : at] = row",
    ),
    ("swap_in", "        list_size[0] = 0;\n", ""),
    ("swap_in", "(u64)(base + sorted_to[m])", "(u64)sorted_to[m]"),
]


@pytest.mark.parametrize(("source", "text", "replacement"), BREAKAGES)
def test_the_cases_notice_a_broken_swap_in(source: str, text: str, replacement: str):
    backend = emulated(edit=(text, replacement), edited=source)
    # What is broken may show as a difference or as an index out of bounds that a later check finds.
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        check_swap_in_steps(backend, SMALL, steps=10, seed=20)


@pytest.mark.parametrize(
    ("edit", "passes"),
    [(None, True), (("if (lane == 31) scan[warp] = sum;\n    __syncthreads();", "if (lane == 31) scan[warp] = sum;"), False)],
    ids=["as written", "one barrier less"],
)  # fmt: skip
def test_a_missing_barrier_shows(edit: tuple[str, str] | None, passes: bool):
    # In a process of its own, because a race may also write anywhere.
    backend = emulated(77, edit=edit, edited="swap_in")
    child = multiprocessing.get_context("fork").Process(target=ten_steps, args=(backend,))
    child.start()
    child.join(timeout=60)
    assert child.exitcode is not None
    assert (child.exitcode == 0) == passes


def test_the_emulation_notices_threads_that_wait_for_ever_and_writes_beyond_shared_memory():
    stuck = emulated(edit=("if (threadIdx.x == 0 && atomicAdd(list_size + 1", "if (threadIdx.x & 1) __all_sync(FULL_WARP, true);\n    if (threadIdx.x == 0 && atomicAdd(list_size + 1"), edited="swap_in")  # fmt: skip
    with pytest.raises(RuntimeError, match="swap_in_copy: threads wait for one another for ever"):
        check_swap_in_steps(stuck, SMALL, steps=5, seed=20)
    beyond = emulated(edit=("int* buckets = scan + 33;", "int* buckets = scan + 33 + 64;"), edited="swap_in")
    with pytest.raises(RuntimeError, match="swap_in_resolve: shared memory was written beyond its end"):
        check_swap_in_steps(beyond, SMALL, steps=5, seed=20)


def hot_state(slots: int, hot_rows: int) -> HotState:
    return HotState(
        torch.zeros(slots, C4_PAGE.page_bytes, dtype=torch.uint8),
        torch.full((slots, hot_rows + 1), -1, dtype=torch.int32),
        torch.arange(hot_rows, dtype=torch.int32).repeat(slots, 1),
        torch.zeros(2, dtype=torch.int64),
        64,
    )


@pytest.mark.parametrize("bad", [-2, 128, 2**40])
def test_wrong_rows_are_left_out_without_waiting_and_reported_later(bad: int):
    kernels = emulated(strict=False).kernels
    pages = torch.zeros(2, C4_PAGE.page_bytes, dtype=torch.uint8)
    kernels.pack_rows(torch.ones(2, 512), pages, torch.tensor([1, bad]), C4_PAGE)
    only = torch.zeros_like(pages)
    kernels.pack_rows(torch.ones(1, 512), only, torch.tensor([1]), C4_PAGE)
    assert torch.equal(pages, only)
    with pytest.raises(ValueError, match=rf"target row {bad} \(place 1 of the list\) is not in \[0, 128\)"):
        kernels.check_faults()
    kernels.check_faults()
    source = torch.ones_like(pages)
    kernels.transfer_rows(source, torch.tensor([0, bad]), pages, torch.tensor([5, 6]), C4_PAGE, C4_PAGE)
    with pytest.raises(ValueError, match=rf"source row {bad} "):
        kernels.check_faults()
    kernels.transfer_rows(source, torch.tensor([0, 1]), pages, torch.tensor([5, bad]), C4_PAGE, C4_PAGE)
    with pytest.raises(ValueError, match=rf"target row {bad} "):
        kernels.check_faults()
    assert pages[0, 6 * 576 : 7 * 576].sum() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3.4e38])
@pytest.mark.parametrize("column", [0, 127, 447, 511])
def test_a_row_that_is_not_finite_in_bf16_is_left_out_and_reported(bad: float, column: int):
    kernels = emulated(strict=False).kernels
    pages = torch.zeros(1, C4_PAGE.page_bytes, dtype=torch.uint8)
    rows = torch.zeros(3, 512)
    rows[1, column] = bad
    kernels.pack_rows(rows, pages, torch.tensor([3, 4, 5]), C4_PAGE)
    assert pages[0, C4_PAGE.scale_offset + 8 * 3].item() == 105
    assert pages[0, C4_PAGE.scale_offset + 8 * 4].item() == 0
    with pytest.raises(ValueError, match="row 1 of 3 holds NaN or infinity"):
        kernels.check_faults()


@pytest.mark.parametrize("split_up_to", [0, 8])
@pytest.mark.parametrize(
    ("selected", "slot", "page", "message"),
    [
        ([150], 0, 0, r"batch row 1 selects entries outside \[-1, 150\): 150"),
        ([-2], 0, 0, r"batch row 1 selects entries outside"),
        ([0], 2, 0, r"slot 2 of batch row 1 is not in \[-1, 2\)"),
        ([0], -2, 0, r"slot -2 of batch row 1"),
        ([0], 0, 3, r"batch row 1 needs host page 3, which is not in \[0, 3\)"),
        ([0], 0, -1, r"batch row 1 needs host page -1"),
        ([149], 0, 0, ""),
    ],
)
def test_a_wrong_batch_row_is_refused_whole_and_its_neighbour_served(
    selected: list[int], slot: int, page: int, message: str, split_up_to: int
):
    kernels = emulated(strict=False, split_up_to=split_up_to).kernels
    hot = hot_state(2, 4)
    before = (hot.entries[0].clone(), hot.recency[0].clone(), hot.pages[0].clone())
    host = HostRows(torch.ones(3, C4_PAGE.page_bytes, dtype=torch.uint8), torch.tensor([[0, 1, 2], [page, 1, 2]]))
    out = kernels.swap_in(
        torch.tensor([[70, 70], [*selected, -1]]), torch.tensor([1, slot]), torch.tensor([150, 150]), host, hot
    )
    assert out[0].tolist() == [64, 64]
    assert hot.pages[1, :576].sum() == 576
    if not message:
        assert out[1].tolist() == [4, -1]
        kernels.check_faults()
        return
    assert out[1].tolist() == [-1, -1]
    assert all(torch.equal(a, b[0]) for a, b in zip(before, (hot.entries, hot.recency, hot.pages), strict=True))
    with pytest.raises(ValueError, match=message):
        kernels.check_faults()


def test_a_corrupt_recency_order_is_refused():
    kernels = emulated(strict=False).kernels
    hot = hot_state(1, 4)
    hot.recency[0, 2] = 4
    host = HostRows(torch.ones(3, C4_PAGE.page_bytes, dtype=torch.uint8), torch.tensor([[0, 1, 2]]))
    out = kernels.swap_in(torch.tensor([[7]]), torch.tensor([0]), torch.tensor([150]), host, hot)
    assert out.tolist() == [[-1]]
    with pytest.raises(ValueError, match="hot buffer of batch row 0 is corrupt: row 4 of 4"):
        kernels.check_faults()


def test_wrong_shapes_types_and_lengths_are_refused_before_a_launch():
    kernels = emulated().kernels
    pages = torch.zeros(2, C4_PAGE.page_bytes, dtype=torch.uint8)
    one = torch.tensor([0])
    for call, message in [
        (lambda: kernels.pack_rows(torch.ones(1, 511), pages, one, C4_PAGE), r"must be \[n, 512\]"),
        (lambda: kernels.pack_rows(torch.ones(1, 512).half(), pages, one, C4_PAGE), "fp32 or bf16"),
        (lambda: kernels.pack_rows(torch.ones(2, 512), pages, one, C4_PAGE), "2 rows but 1 places"),
        (lambda: kernels.pack_rows(torch.ones(1, 512), pages, one, WINDOW_PAGE), r"pages must be \[n, 149760\]"),
        (lambda: kernels.pack_rows(torch.ones(1, 512), pages, one.int(), C4_PAGE), "places must be"),
        (lambda: kernels.unpack_rows(pages, torch.tensor([-2]), C4_PAGE), r"row -2 is not in \[-1, 128\)"),
        (lambda: kernels.transfer_rows(pages, one, pages, torch.tensor([1, 2]), C4_PAGE, C4_PAGE), "1 source places but 2"),
        (lambda: kernels.transfer_layers([], one, [], one, C4_PAGE, C4_PAGE), "0 source buffers"),
        (lambda: kernels.transfer_layers([pages], one, [pages[:1]] * 2, one, C4_PAGE, C4_PAGE), "1 source buffers but 2"),
        (lambda: kernels.transfer_layers([pages, pages[:1]], one, [pages, pages], one, C4_PAGE, C4_PAGE), "1 pages, others 2"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    launcher = kernels._launcher
    assert isinstance(launcher, EmulatedLauncher)
    assert launcher.launches == []


def test_no_rows_at_all_are_no_launch():
    backend = emulated()
    none, pages = torch.zeros(0, dtype=torch.int64), torch.zeros(1, C4_PAGE.page_bytes, dtype=torch.uint8)
    backend.kernels.pack_rows(torch.zeros(0, 512), pages, none, C4_PAGE)
    assert backend.kernels.unpack_rows(pages, none, C4_PAGE).shape == (0, 512)
    backend.kernels.transfer_rows(pages, none, pages, none, C4_PAGE, C4_PAGE)
