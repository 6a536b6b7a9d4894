"""What leaves the send ring, put where a ticket says, is the request's KV; chunking changes no byte."""

import ctypes
import dataclasses

import pytest
import torch

from common.kernels.cpu import cpu_kernels
from common.model.config import ModelConfig
from common.model.model import DeepSeekV4Model, PrefillChunk
from common.model.small_checkpoint import random_weights, small_config
from common.transfer.plan import Run
from common.transfer.send_ring import SendRing
from common.transfer.ticket import TransferTicket
from decode_service.device_pools import DevicePools
from decode_service.hisparse import HiSparseCoordinator
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.resources import RequestResources, ResourcePools
from decode_service.verification import HandoverCheck, LandedRange
from prefill_service.packing import ChunkPlan, outgoing_pages, outgoing_rest
from prefill_service.sequence_kv import SequenceKV
from tests.support.lengths import BORDERS

CONFIG = ModelConfig.from_dict(small_config(num_hidden_layers=3, compress_ratios=[0, 4, 128], n_routed_experts=2))
KERNELS = cpu_kernels()


@pytest.fixture(scope="module")
def model() -> DeepSeekV4Model:
    return DeepSeekV4Model(CONFIG, random_weights(CONFIG, 0))


def write(runs: list[Run]) -> None:
    for run in runs:
        ctypes.memmove(run.target, run.source, run.size)


class Receiver:
    def __init__(self, tokens: int, seed: int) -> None:
        self.host = DeepSeekV4PagedHostPool(CONFIG.layers_of(4), 12, KERNELS, seed)
        self.device = DevicePools.of(CONFIG, 12, 3, seed)
        pools = ResourcePools(self.host, self.device, HiSparseCoordinator(self.host, KERNELS, 3, 64, seed).slots)
        resources = pools.reserve(tokens)
        assert resources is not None
        self.resources: RequestResources = resources
        self.ticket = TransferTicket(
            "s", "r", self.device.regions(self.host), resources.host_pages, resources.logical_pages,
            resources.window_slot, resources.state_slot, verify=True,
        )  # fmt: skip

    def content(self) -> list[torch.Tensor]:
        """The request's own memory, page by page in its own order."""
        r = self.resources
        parts = [buffer[list(r.host_pages)] for buffer in self.host.buffers.values()]
        parts += [buffer[list(r.logical_pages[: len(r.host_pages)])] for buffer in self.device.index.values()]
        parts += [buffer[list(r.logical_pages)] for buffer in self.device.c128.values()]
        parts += [buffer[r.window_slot] for buffer in self.device.window.values()]
        return parts + [state[r.state_slot] for state in self.device.states.values()]


def hand_over(model: DeepSeekV4Model, tokens: torch.Tensor, chunk: int, seed: int, there: int = 0) -> Receiver:
    """`there`: pages that the receiver has already."""
    length = len(tokens)
    receiver = Receiver(length, seed)
    receiver.ticket = dataclasses.replace(
        receiver.ticket, host_pages=receiver.ticket.host_pages[there:],
        logical_pages=receiver.ticket.logical_pages[there:], first_page=there,
    )  # fmt: skip
    ring, kv = SendRing(16 << 20), SequenceKV(CONFIG, KERNELS)
    check = HandoverCheck(receiver.ticket, length, tuple(enumerate(CONFIG.compress_ratios)), "here")
    for start in range(0, length, chunk):
        plan = ChunkPlan(CONFIG.compress_ratios, length, start, min(start + chunk, length))
        span = ring.take(plan.span_bytes)
        assert span is not None
        kv.stage(plan.staging(span))
        model.prefill([PrefillChunk(tokens[plan.start : plan.end], kv, "none")])
        sent = [outgoing_pages(plan, span, receiver.ticket, 0, plan.complete_pages)] if plan.complete_pages else []
        if plan.is_last:
            sent.append(outgoing_rest(plan, span, receiver.ticket, kv))
        for outgoing in sent:
            for run in outgoing.runs:
                assert span.address <= run.source
                assert run.source + run.size <= span.address + span.data.numel()
            write(outgoing.runs)
            check.add(LandedRange(r.layer, r.kind, r.first, r.count, r.digest) for r in outgoing.ranges)
        ring.release(span)
    check.check_complete()
    return receiver


@pytest.mark.parametrize("length", BORDERS)
def test_chunking_and_page_ids_change_no_byte(model: DeepSeekV4Model, length: int):
    tokens = torch.randint(4, 260, (length,), generator=torch.Generator().manual_seed(length))
    whole, chunked = hand_over(model, tokens, 1024, seed=1), hand_over(model, tokens, 256, seed=2)
    for one, other in zip(whole.content(), chunked.content(), strict=True):
        if one.dtype == torch.uint8 and one.shape[-1] != 149760:
            assert torch.equal(one, other)
        elif one.dtype != torch.uint8:
            assert torch.allclose(one, other, atol=1e-5)


def test_a_pages_bytes_depend_on_nothing_behind_it(model: DeepSeekV4Model):
    """What lets one prompt's pages serve every prompt that begins with the same tokens."""
    tokens = torch.randint(4, 260, (1000,), generator=torch.Generator().manual_seed(1))
    long = hand_over(model, tokens, 512, seed=1)
    for length in (256, 257, 300, 515, 700):
        short = hand_over(model, tokens[:length], 512, seed=2)
        pages = length // 256
        mine, theirs = (list(r.resources.logical_pages[:pages]) for r in (short, long))
        for kind in ("index", "c128"):
            for layer, buffer in getattr(short.device, kind).items():
                assert torch.equal(buffer[mine], getattr(long.device, kind)[layer][theirs])
        mine, theirs = (list(r.resources.host_pages[:pages]) for r in (short, long))
        for layer, buffer in short.host.buffers.items():
            assert torch.equal(buffer[mine], long.host.buffers[layer][theirs])


@pytest.mark.parametrize("there", [1, 2, 3])
def test_pages_that_the_receiver_has_are_not_sent_and_their_places_not_touched(model: DeepSeekV4Model, there: int):
    tokens = torch.randint(4, 260, (777,), generator=torch.Generator().manual_seed(2))
    whole, part = hand_over(model, tokens, 256, seed=1), hand_over(model, tokens, 256, seed=2, there=there)
    for one, other in zip(whole.content(), part.content(), strict=True):
        if one.dtype == torch.uint8 and one.shape[-1] != 149760:
            assert (other[:there] == 0).all()
            assert torch.equal(one[there:], other[there:])


def test_a_span_is_as_large_as_what_is_put_into_it():
    for length in BORDERS:
        plan = ChunkPlan(CONFIG.compress_ratios, length, 0, length)
        assert plan.span_bytes >= plan.page_bytes
        assert plan.pages(next(iter(plan.page_offsets()))[1]) >= 0 if plan.page_offsets() else True
