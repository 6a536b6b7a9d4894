"""Runs one decode step of a batch: op by op on the CPU, as a captured CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch
from torch import Tensor

from common.kernels.attention import DecodeAttention, TorchDecodeAttention
from common.kernels.interface import KVKernels
from common.model.model import DeepSeekV4Model
from decode_service.decode_kv import BatchTables, PagedDecodeKV
from decode_service.device_pools import DevicePools
from decode_service.fixed_kv import FixedPagedKV
from decode_service.hisparse import HiSparseCoordinator
from decode_service.resources import RequestResources

ROW_MULTIPLE = 8


class DecodeRunner(Protocol):
    def step(self, resources: Sequence[RequestResources], positions: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """One token each: logits [n, vocab] fp32 in host memory. Raises ValueError for what the kernels refuse."""
        ...


class EagerRunner:
    """Op by op, with shapes that follow the batch."""

    def __init__(
        self, model: DeepSeekV4Model, kernels: KVKernels, device: DevicePools, hisparse: HiSparseCoordinator
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._device = device
        self._hisparse = hisparse
        self._batch: tuple[RequestResources, ...] = ()
        self._tables: BatchTables | None = None

    def step(self, resources: Sequence[RequestResources], positions: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """See DecodeRunner.step."""
        where = self._device.where
        if self._tables is None or not _same(self._batch, resources):
            self._batch = tuple(resources)
            self._tables = BatchTables.of(list(resources), where)
        at, ids = torch.tensor(positions, device=where), torch.tensor(tokens, device=where)
        kv = PagedDecodeKV(self._tables, at, self._device, self._hisparse, self._kernels)
        logits = self._model.decode(ids, kv).cpu()
        kv.end_step()
        self._kernels.check_faults()
        return logits


@dataclass
class _Captured:
    """Inputs at fixed addresses, and what computes from them; `graph` None: op by op (no GPU)."""

    tables: BatchTables
    positions: Tensor
    tokens: Tensor
    kv: FixedPagedKV
    batch: tuple[RequestResources, ...]
    graph: torch.cuda.CUDAGraph | None
    logits: Tensor | None


class FixedRunner:
    """In fixed shapes: batches are padded to 8, 16, 32 ... rows; on a GPU each size is captured once as a graph, at its
    first use. `most_pages` bounds the pages of a request, and with them the entries that are scored."""

    def __init__(
        self, model: DeepSeekV4Model, kernels: KVKernels, attention: DecodeAttention, device: DevicePools,
        hisparse: HiSparseCoordinator, most_pages: int,
    ) -> None:  # fmt: skip
        self._model = model
        self._kernels = kernels
        self._attention = attention
        self._device = device
        self._hisparse = hisparse
        self._most_pages = most_pages
        self._captured: dict[int, _Captured] = {}

    @torch.inference_mode()
    def step(self, resources: Sequence[RequestResources], positions: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """See DecodeRunner.step."""
        count = len(resources)
        rows = ROW_MULTIPLE
        while rows < count:
            rows *= 2
        captured = self._captured.get(rows)
        if captured is None:
            captured = self._captured[rows] = self._capture(rows)
        if not _same(captured.batch, resources):
            self._fill(captured, resources)
        padding = [0] * (rows - count)
        captured.positions.copy_(torch.tensor([*positions, *padding]), non_blocking=True)
        captured.tokens.copy_(torch.tensor([*tokens, *padding]), non_blocking=True)
        if captured.graph is None:
            logits = self._compute(captured)
        else:
            captured.graph.replay()
            logits = captured.logits
        assert logits is not None  # noqa: S101 - set with the graph
        found = logits[:count].cpu()
        self._kernels.check_faults()
        return found

    def _fill(self, captured: _Captured, resources: Sequence[RequestResources]) -> None:
        """Puts a batch's tables at the fixed addresses; padding rows own nothing."""
        scratch = self._device.scratch_slot
        tables = captured.tables
        rows = tables.hot.shape[0]

        def one(target: Tensor, values: list[int], fill: int) -> None:
            target.copy_(torch.tensor(values + [fill] * (rows - len(values))))

        def pages(target: Tensor, lists: list[Sequence[int]]) -> None:
            filled = torch.full((rows, self._most_pages), -1, dtype=torch.int64)
            for row, ids in enumerate(lists):
                filled[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            target.copy_(filled)

        one(tables.window, [r.window_slot for r in resources], 0)
        one(tables.state, [r.state_slot for r in resources], scratch)
        one(tables.hot, [r.hot_slot for r in resources], -1)
        pages(tables.host_pages, [r.host_pages for r in resources])
        pages(tables.logical_pages, [r.logical_pages for r in resources])
        captured.batch = tuple(resources)

    def _capture(self, rows: int) -> _Captured:
        where = self._device.where

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=where)

        tables = BatchTables(
            numbers(rows),
            numbers(rows),
            numbers(rows),
            numbers(rows, self._most_pages),
            numbers(rows, self._most_pages),
        )
        positions, tokens = numbers(rows), numbers(rows)
        kv = FixedPagedKV(
            tables, positions, self._device, self._hisparse, self._kernels, self._attention,
            self._model.config.index_topk,
        )  # fmt: skip
        captured = _Captured(tables, positions, tokens, kv, (), None, None)
        self._fill(captured, ())
        if where.type != "cuda":
            return captured
        # Once without a graph, over padding alone: compiles kernels and touches no request.
        side = torch.cuda.Stream(where)
        side.wait_stream(torch.cuda.current_stream(where))
        with torch.cuda.stream(side):
            self._compute(captured)
        torch.cuda.current_stream(where).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured.logits = self._compute(captured)
        captured.graph = graph
        structlog.get_logger().info("decode step captured", rows=rows)
        return captured

    def _compute(self, captured: _Captured) -> Tensor:
        captured.kv.begin()
        logits = self._model.decode_fixed(captured.tokens, captured.kv)
        captured.kv.end()
        return logits


def _same(left: Sequence[RequestResources], right: Sequence[RequestResources]) -> bool:
    """Whether both are the same objects: their page lists are long."""
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def open_runner(
    model: DeepSeekV4Model, kernels: KVKernels, device: DevicePools, hisparse: HiSparseCoordinator, most_pages: int
) -> DecodeRunner:
    """Graphs on a GPU, with Triton's kernels where Triton is installed; op by op on the CPU."""
    if device.where.type != "cuda":
        return EagerRunner(model, kernels, device, hisparse)
    try:
        from common.kernels.triton_attention import TritonDecodeAttention

        attention: DecodeAttention = TritonDecodeAttention()
    except ImportError:
        attention = TorchDecodeAttention(kernels)
    return FixedRunner(model, kernels, attention, device, hisparse, most_pages)
