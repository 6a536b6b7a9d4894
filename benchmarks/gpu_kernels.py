"""KV kernels on a GPU: bytes, time, GB/s and the ratio to a ceiling measured in the same run.

    python -m benchmarks.gpu_kernels [--spans 0.6 2.3 9 32] [--device cuda:0]

Every case is a CUDA graph of several steps over different data, so that launches cost what they cost in a captured
decode step; a time is the median of its replays over the steps. Bytes are those that a case must move. Ceilings:
pack and unpack against a device-to-device copy (bytes read and written), swap-in against a pinned host-to-device copy.
Naive alternatives: what one would write in torch.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels.cuda_backend import CudaKernels
from common.kernels.cuda_launch import CupyLauncher
from common.kernels.interface import HostRows, HotState
from common.kv.layout import C4_PAGE, INDEX_PAGE

ROW_BYTES = 584
HOT_ROWS, TOPK = 1024, 512
# Microseconds of the best public swap-in kernel on an H200: same layout, 512 of 65 536 entries a request, 1 024 hot
# rows, events around the kernel. By batch: all missing, a tenth missing, none.
PUBLIC_US = {1: (38, 13, 8), 8: (63, 20, 10), 32: (266, 32, 12), 64: (530, 63, 11)}
PUBLIC_PAGES = 1024

Step = Callable[[], object]


@dataclass(frozen=True)
class Machine:
    """Kernels and where their data lives; `time` gives the seconds of one of the steps, run in order."""

    kernels: CudaKernels
    device: torch.device
    pin: Callable[[Tensor], Tensor]
    time: Callable[[list[Step]], float]


@dataclass(frozen=True)
class Result:
    name: str
    bytes_moved: int
    seconds: float
    ceiling: float  # bytes per second; 0 where there is none

    def __str__(self) -> str:
        rate = self.bytes_moved / self.seconds
        ratio = f"{rate / self.ceiling:6.1%}" if self.ceiling else "     -"
        size, time = f"{self.bytes_moved / 1e6:>10.2f} MB", f"{self.seconds * 1e6:>11.1f} us"
        return f"{self.name:<58}{size}{time}{rate / 1e9:>9.1f} GB/s {ratio}"


def graph_time(steps: list[Step], replays: int = 9) -> float:
    """Median seconds a step, by events around replays of a graph of all steps."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    times: list[float] = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(steps))
    return statistics.median(times)


def eager_time(steps: list[Step], repeats: int = 5) -> float:
    """The same without a graph, for what can't be captured."""
    times: list[float] = []
    for repeat in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for step in steps:
            step()
        end.record()
        end.synchronize()
        if repeat:
            times.append(begin.elapsed_time(end) / 1e3 / len(steps))
    return statistics.median(times)


def ceilings(machine: Machine, size: int) -> tuple[float, float]:
    """Bytes per second of a device copy (read and written) and of a pinned copy to the device."""
    source, target = (torch.randint(0, 256, (size,), dtype=torch.uint8, device=machine.device) for _ in range(2))
    host = machine.pin(torch.zeros(size // 4, dtype=torch.uint8))
    # A copy kernel beats cudaMemcpy here; the ceiling is the better of both.
    words, to = source.view(torch.int64), target.view(torch.int64)
    copy = min(
        machine.time([lambda: target.copy_(source)] * 8), machine.time([lambda: torch.bitwise_or(words, 0, out=to)] * 8)
    )
    upload = machine.time([lambda: target[: size // 4].copy_(host, non_blocking=True)] * 2)
    return 2 * size / copy, size // 4 / upload


def row_cases(machine: Machine, rows: int, device_rate: float) -> list[Result]:
    """Pack and unpack rows and index keys, from and to rows in random order."""
    device = machine.device
    kernels, results = machine.kernels, []
    pages = torch.zeros(-(-rows // 64), C4_PAGE.page_bytes, dtype=torch.uint8, device=device)
    index = torch.zeros(-(-rows // 64), INDEX_PAGE.page_bytes, dtype=torch.uint8, device=device)
    places = torch.randperm(rows, device=device)
    for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4)):
        values = torch.randn(rows, 512, device=device).to(dtype)
        keys = torch.randn(rows, 128, device=device).to(dtype)
        for name, step, moved in (
            (
                f"pack {rows} rows, {dtype}",
                lambda v=values: kernels.pack_rows(v, pages, places, C4_PAGE),
                512 * size + 592,
            ),
            (
                f"pack {rows} index keys, {dtype}",
                lambda k=keys: kernels.pack_index_keys(k, index, places),
                128 * size + 140,
            ),
        ):
            results.append(Result(name, rows * moved, machine.time([step] * 3), device_rate))
    seconds = machine.time([lambda: kernels.unpack_rows(pages, places, C4_PAGE)] * 3)
    results.append(Result(f"unpack {rows} rows", rows * (ROW_BYTES + 8 + 2048), seconds, device_rate))
    order = torch.arange(rows, device=device) // 64 * 64
    aligned = order.flip(0)[: rows // 64 * 64] + torch.arange(rows // 64 * 64, device=device) % 64
    target = torch.zeros_like(pages)
    for name, source in (("rows", places), ("whole pages", aligned)):
        to = torch.arange(len(source), device=device)
        seconds = machine.time(
            [lambda s=source, t=to: kernels.transfer_rows(pages, s, target, t, C4_PAGE, C4_PAGE)] * 3
        )
        results.append(Result(f"transfer {len(source)} {name}", len(source) * 2 * ROW_BYTES, seconds, device_rate))
    return results


@dataclass(frozen=True)
class SwapSetup:
    host: HostRows
    hot: HotState
    slots: Tensor
    counts: Tensor
    entries: int


def swap_setup(machine: Machine, host_pages: Tensor, batch: int, span_pages: int, scattered: bool) -> SwapSetup:
    """`batch` requests that share `span_pages` host pages, each its pages one after another or anywhere."""
    mine = span_pages // batch
    order = torch.randperm(span_pages) if scattered else torch.arange(span_pages)
    slot_pages = -(-(HOT_ROWS + 1) // 64)
    hot = HotState(
        torch.zeros(batch * slot_pages, C4_PAGE.page_bytes, dtype=torch.uint8, device=machine.device),
        torch.full((batch, HOT_ROWS + 1), -1, dtype=torch.int32, device=machine.device),
        torch.arange(HOT_ROWS, dtype=torch.int32).repeat(batch, 1).to(machine.device),
        torch.zeros(2, dtype=torch.int64, device=machine.device),
        slot_pages * 64,
    )
    table = order[: batch * mine].view(batch, mine).to(machine.device)
    return SwapSetup(
        HostRows(host_pages, table),
        hot,
        torch.arange(batch, device=machine.device),
        torch.full((batch,), mine * 64, device=machine.device),
        mine * 64,
    )


def set_count(fresh: int) -> int:
    return 4 if fresh == 0 else max(4, (HOT_ROWS - TOPK) // fresh + 3)


def selections(setup: SwapSetup, batch: int, missing: float) -> list[Tensor]:
    """Selections of TOPK entries a request, run in a ring: a common core, and `missing` of them fresh. There are so
    many that the hot rows have lost a selection's fresh entries when its turn comes again."""
    fresh = round(TOPK * missing)
    sets = set_count(fresh)
    need = TOPK - fresh + sets * fresh
    if need > setup.entries - 1:
        raise ValueError(f"{need} different entries a request are needed, there are {setup.entries - 1}")
    device = setup.slots.device
    drawn = torch.stack([torch.randperm(setup.entries - 1, device=device)[:need] for _ in range(batch)])
    core, rest = drawn[:, : TOPK - fresh], drawn[:, TOPK - fresh :]
    sets = [torch.cat([core, rest[:, i * fresh : (i + 1) * fresh]], dim=1) for i in range(sets)]
    return [ids.gather(1, torch.rand(ids.shape, device=device).argsort(dim=1)) for ids in sets]


def swap_case(
    machine: Machine, host_pages: Tensor, batch: int, span_pages: int, scattered: bool, missing: float, rate: float
) -> Result:
    """Raises RuntimeError when the hit and miss counters disagree with the case."""
    setup = swap_setup(machine, host_pages, batch, span_pages, scattered)
    chosen = selections(setup, batch, missing)

    def step(ids: Tensor) -> object:
        return machine.kernels.swap_in(ids, setup.slots, setup.counts, setup.host, setup.hot)

    for ids in chosen:
        step(ids)
    setup.hot.counters.zero_()
    seconds = machine.time([lambda ids=ids: step(ids) for ids in chosen])
    hits, misses = setup.hot.counters.tolist()
    machine.kernels.check_faults()
    fresh = round(TOPK * missing)
    if misses * TOPK != (hits + misses) * fresh:
        raise RuntimeError(f"{misses} misses of {hits + misses}, expected {fresh} of {TOPK}")
    where = "scattered" if scattered else "contiguous"
    span = span_pages * C4_PAGE.page_bytes / 2**30
    name = f"swap-in {batch:>3} x {TOPK}, {fresh / TOPK:4.0%} missing, {span:.2f} GiB {where}"
    return Result(name, batch * fresh * ROW_BYTES or batch * TOPK * 8, seconds, rate if fresh else 0.0)


def public_cases(machine: Machine, host_pages: Tensor, rate: float) -> list[str]:
    """The cases of PUBLIC_US, ours beside theirs."""
    lines: list[str] = []
    for batch, theirs in PUBLIC_US.items():
        for missing, peer in zip((1.0, 0.1, 0.0), theirs, strict=True):
            ours = swap_case(machine, host_pages, batch, batch * PUBLIC_PAGES, False, missing, rate)
            lines.append(f"{ours}   public {peer:>4} us, {peer / (ours.seconds * 1e6):.1f}x as fast")
    return lines


def naive_cases(machine: Machine, host_pages: Tensor, rate: float) -> list[Result]:
    """512 rows: gathered by the CPU and then copied; one asynchronous copy a piece of a row."""
    rows = 512
    places = torch.randperm(host_pages.shape[0] * 64)[:rows]
    data = host_pages[:, : C4_PAGE.scale_offset].unflatten(1, (64, 576))
    scales = host_pages[:, C4_PAGE.scale_offset : C4_PAGE.scale_offset + 512].unflatten(1, (64, 8))
    target = torch.zeros(rows, ROW_BYTES, dtype=torch.uint8, device=machine.device)
    page, row = places // 64, places % 64

    def gather() -> None:
        target[:, :576].copy_(data[page, row])
        target[:, 576:].copy_(scales[page, row])

    def each() -> None:
        for i in range(rows):
            target[i, :576].copy_(data[page[i], row[i]], non_blocking=True)
            target[i, 576:].copy_(scales[page[i], row[i]], non_blocking=True)

    return [
        Result(f"naive: index on the host, copy ({rows} rows)", rows * ROW_BYTES, eager_time([gather]), rate),
        Result(f"naive: cudaMemcpyAsync a piece ({rows} rows)", rows * ROW_BYTES, eager_time([each]), rate),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rows", type=int, default=1 << 20, help="rows to pack")
    parser.add_argument(
        "--spans", type=float, nargs="+", default=[0.6, 2.3, 9.0, 32.0], help="GiB of host pages in use"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 256, 512])
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    machine = Machine(CudaKernels(CupyLauncher(device)), device, lambda t: t.pin_memory(), graph_time)
    device_rate, upload_rate = ceilings(machine, 1 << 32)
    now = datetime.datetime.now(datetime.UTC)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {now:%Y-%m-%d}")
    print(f"device copy {device_rate / 1e9:.0f} GB/s, pinned copy to the device {upload_rate / 1e9:.1f} GB/s")
    for result in row_cases(machine, arguments.rows, device_rate):
        print(result, flush=True)
    most_pages = int(max(arguments.spans) * 2**30) // C4_PAGE.page_bytes
    host_pages = torch.empty(most_pages, C4_PAGE.page_bytes, dtype=torch.uint8, pin_memory=True)
    noise = torch.randint(0, 256, (8192, C4_PAGE.page_bytes), dtype=torch.uint8, device=device)
    for begin in range(0, most_pages, 8192):
        host_pages[begin : begin + 8192].copy_(noise[: min(8192, most_pages - begin)])
    del noise
    for result in naive_cases(machine, host_pages, upload_rate):
        print(result, flush=True)
    for line in public_cases(machine, host_pages, upload_rate):
        print(line, flush=True)
    for span in arguments.spans:
        span_pages = int(span * 2**30) // C4_PAGE.page_bytes
        for batch in arguments.batches:
            if span_pages // batch * 64 <= 4 * TOPK + 1:
                continue
            for missing in (1.0, 0.125, 0.0):
                for scattered in (False, True) if missing == 1.0 else (False,):
                    print(
                        swap_case(machine, host_pages, batch, span_pages, scattered, missing, upload_rate), flush=True
                    )


if __name__ == "__main__":
    main()
