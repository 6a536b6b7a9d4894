"""The handover and decoding in one process, with a hook between landing and admission: for mutations."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import torch

from common.kernels.cpu import cpu_kernels
from common.model.model import DeepSeekV4Model, PrefillChunk
from common.transfer.send_ring import SendRing
from common.transfer.ticket import TransferTicket
from decode_service.decode_kv import BatchTables, PagedDecodeKV
from decode_service.device_pools import DevicePools
from decode_service.hisparse import HiSparseCoordinator
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.resources import RequestResources, ResourcePools
from prefill_service.packing import ChunkPlan, outgoing_pages, outgoing_rest
from prefill_service.sequence_kv import SequenceKV

CHUNK = 512


@dataclasses.dataclass
class Landed:
    """A request whose handover has landed and that is not admitted yet."""

    host: DeepSeekV4PagedHostPool
    device: DevicePools
    resources: RequestResources
    tokens: int


def answer(
    model: DeepSeekV4Model,
    prompt: list[int],
    output: int,
    hot_entries: int,
    mutate: Callable[[Landed], None] | None = None,
) -> list[int]:
    """Greedy tokens of a prompt through packing, landing in shuffled pages, direct admission and HiSparse."""
    config, kernels = model.config, cpu_kernels()
    host = DeepSeekV4PagedHostPool(config.layers_of(4), 48, kernels, 3)
    device = DevicePools.of(config, 48, 2, 3)
    hisparse = HiSparseCoordinator(host, kernels, 2, hot_entries, 3)
    resources = ResourcePools(host, device, hisparse.slots).reserve(len(prompt) + output)
    if resources is None:
        raise ValueError("the prompt does not fit the pools of this helper")
    first = hand_over(model, prompt, host, device, resources)
    landed = Landed(host, device, resources, len(prompt))
    if mutate is not None:
        mutate(landed)
    hisparse.admit_request_direct(landed.resources, len(prompt))
    tables = BatchTables.of([landed.resources])
    made = [first]
    while len(made) < output:
        position = torch.tensor([len(prompt) + len(made) - 1])
        kv = PagedDecodeKV(tables, position, device, hisparse, kernels)
        made.append(int(model.decode(torch.tensor([made[-1]]), kv)[0].argmax()))
        kv.end_step()
    return made


def hand_over(
    model: DeepSeekV4Model,
    prompt: list[int],
    host: DeepSeekV4PagedHostPool,
    device: DevicePools,
    resources: RequestResources,
) -> int:
    ratios, tokens = model.config.compress_ratios, torch.tensor(prompt)
    ring, kv = SendRing(32 << 20), SequenceKV(model.config, cpu_kernels())
    needed_host, needed_logical = len(prompt) // 4, len(prompt)
    ticket = TransferTicket(
        "s", "r", device.regions(host), resources.host_pages[: -(-needed_host // 64)],
        resources.logical_pages[: -(-needed_logical // 256)], resources.window_slot, resources.state_slot, verify=False,
    )  # fmt: skip
    first = -1
    for start in range(0, len(prompt), CHUNK):
        plan = ChunkPlan(ratios, len(prompt), start, min(start + CHUNK, len(prompt)))
        span = ring.take(plan.span_bytes)
        if span is None:
            raise ValueError("the ring of this helper is too small")
        kv.stage(plan.staging(span))
        (logits,) = model.prefill([PrefillChunk(tokens[plan.start : plan.end], kv, "last")])
        sent = [outgoing_pages(plan, span, ticket, 0, plan.complete_pages)]
        if plan.is_last:
            sent.append(outgoing_rest(plan, span, ticket, kv))
            first = -1 if logits is None else int(logits.argmax())
        for outgoing in sent:
            for run in outgoing.runs:
                ctypes.memmove(run.target, run.source, run.size)
        ring.release(span)
    return first
