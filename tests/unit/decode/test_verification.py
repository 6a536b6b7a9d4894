"""A handover is checked as it landed: every byte, every part."""

import dataclasses

import pytest
import torch

from common.errors import ErrorReason, ServiceError
from common.kernels.cpu import cpu_kernels
from common.kv.handover import Handover
from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from common.transfer.digest import digest_of
from common.transfer.ticket import RegionKind, TransferTicket, kinds_of_ratio
from decode_service.device_pools import DevicePools
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.verification import HandoverCheck, LandedRange

CONFIG = ModelConfig.from_dict(small_config())
RATIOS = tuple(enumerate(CONFIG.compress_ratios))
TOKENS = 515


@pytest.fixture
def landed():
    host = DeepSeekV4PagedHostPool(CONFIG.layers_of(4), 6, cpu_kernels())
    device = DevicePools.of(CONFIG, 6, 2)
    generator = torch.Generator().manual_seed(0)
    for buffer in (*host.buffers.values(), *device.index.values(), *device.c128.values(), *device.window.values()):
        buffer.random_(0, 256, generator=generator)
    handover = Handover(TOKENS)
    ticket = TransferTicket("s", "r", device.regions(host), (4, 1), (5, 0, 3), 1, 0, verify=True)
    check = HandoverCheck(ticket, TOKENS, RATIOS, "prefill")
    ranges = []
    for layer, ratio in RATIOS:
        for kind in kinds_of_ratio(ratio):
            if kind in (RegionKind.C4, RegionKind.INDEX):
                parts = [(0, 1), (1, 1)]
            elif kind is RegionKind.C128:
                parts = [(0, 2)]
            elif kind is RegionKind.WINDOW:
                parts = [(run.row, run.count) for run in handover.window_runs()]
            else:
                parts = [(run.row, run.count) for run in handover.state_runs(ratio)]
            for first, count in parts:
                landed_range = LandedRange(layer, kind, first, count, b"")
                digest = __import__("common.transfer.digest", fromlist=["digest_of"]).digest_of(
                    check._pieces(landed_range)
                )
                ranges.append(dataclasses.replace(landed_range, digest=digest))
    # The device pools must live as long as their addresses are used.
    yield check, ranges, host
    del device


def test_a_complete_handover_passes(landed):
    check, ranges, _ = landed
    check.add(ranges)
    check.check_complete()


def test_one_flipped_bit_is_found_and_named(landed):
    check, ranges, host = landed
    host.buffers[3][1, 12345] ^= 1
    with pytest.raises(ServiceError) as raised:
        check.add(ranges)
    assert raised.value.reason is ErrorReason.DIGEST_MISMATCH
    assert raised.value.field == "C4.3"


def test_two_swapped_pages_are_found(landed):
    check, ranges, host = landed
    host.buffers[1][[4, 1]] = host.buffers[1][[1, 4]]
    with pytest.raises(ServiceError, match="other bytes than were sent"):
        check.add(ranges)


@pytest.mark.parametrize("kind", list(RegionKind))
def test_a_component_that_never_came_fails_the_handover(landed, kind: RegionKind):
    check, ranges, _ = landed
    if kind is RegionKind.STATE_C128:
        assert TOKENS % 128 == 3
    missing = next(index for index, r in enumerate(ranges) if r.kind is kind)
    check.add([r for index, r in enumerate(ranges) if index != missing])
    with pytest.raises(ServiceError, match=f"{kind.name} .* never came from prefill"):
        check.check_complete()


def test_a_range_that_comes_again_is_counted_and_one_that_is_not_the_requests_is_refused(landed):
    check, ranges, _ = landed
    check.add(ranges)
    check.add(ranges[:2])
    assert check.repeated == 2
    check.check_complete()
    longer = dataclasses.replace(ranges[0], count=ranges[0].count + 1)
    with pytest.raises(ServiceError, match="came twice in part"):
        check.add([longer])
    with pytest.raises(ServiceError) as raised:
        check.add([LandedRange(1, RegionKind.C4, 2, 1, b"")])
    assert raised.value.reason is ErrorReason.TRANSFER_FAILED


def test_pages_that_were_here_before_must_not_come_and_are_not_waited_for(landed):
    check, ranges, _ = landed
    ticket = dataclasses.replace(check.ticket, host_pages=(1,), logical_pages=(0, 3), first_page=1)
    shared = HandoverCheck(ticket, TOKENS, RATIOS, "prefill")
    paged = (RegionKind.C4, RegionKind.INDEX, RegionKind.C128)
    with pytest.raises(ServiceError, match="page 0 was here before, pages come from 1 on"):
        shared.add([next(r for r in ranges if r.kind in paged and r.first == 0)])
    shared.add([r for r in ranges if r.kind not in paged or (r.first == 1)])
    for layer, ratio in RATIOS:
        if ratio == 128:
            (both,) = [r for r in ranges if (r.layer, r.kind) == (layer, RegionKind.C128)]
            one = dataclasses.replace(both, first=1, count=1, digest=b"")
            shared.add([dataclasses.replace(one, digest=digest_of(shared._pieces(one)))])
    shared.check_complete()
