"""Several ranks, one handover: every byte of every needed row goes exactly once."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kernels.cpu import cpu_kernels
from common.kv.handover import Handover
from common.kv.layout import WINDOW_PAGE
from common.model.config import ModelConfig
from common.model.kv_store import CacheKind
from common.model.small_checkpoint import small_config
from common.transfer.alignment import Place, places, split, stage_layers
from common.transfer.send_ring import SendRing
from common.transfer.ticket import ITEM_BYTES, Region, RegionKind, RegionTable, TransferTicket, kinds_of_ratio
from prefill_service.packing import ChunkPlan, caches_of_ratio, outgoing_pages, outgoing_rest
from prefill_service.sequence_kv import SequenceKV

KV_WIDTHS = {CacheKind.C4: 2048, CacheKind.INDEX: 512, CacheKind.C128: 1024}


@given(st.integers(0, 200), st.integers(1, 9))
def test_parts_are_adjacent_even_and_whole(count: int, parts: int):
    shares = [split(count, parts, index) for index in range(parts)]
    assert [first for first, _ in shares] == [sum(size for _, size in shares[:i]) for i in range(parts)]
    assert sum(size for _, size in shares) == count
    assert max(size for _, size in shares) - min(size for _, size in shares) <= 1


@given(st.integers(1, 61), st.integers(1, 8), st.data())
def test_every_layer_has_one_stage(layers: int, stages: int, data: st.DataObject):
    stages = min(stages, layers)
    cuts = (
        data.draw(st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1)) if stages > 1 else []
    )
    bounds = [0, *sorted(cuts), layers]
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    for given_sizes in ((), sizes):
        found = stage_layers(layers, stages, given_sizes)
        assert [layer for stage in found for layer in stage] == list(range(layers))


@pytest.mark.parametrize(("layers", "stages", "sizes"), [(2, 3, ()), (4, 2, (1, 2)), (4, 2, (4, 0)), (4, 2, (4,))])
def test_impossible_splits_are_refused(layers: int, stages: int, sizes: tuple[int, ...]):
    with pytest.raises(ValueError, match=f"are not {layers} layers"):
        stage_layers(layers, stages, sizes)


def regions(ratios: tuple[int, ...], pages: int) -> RegionTable:
    """Regions that touch one another nowhere, at made-up addresses."""
    found: list[Region] = []
    base = 1 << 20
    for layer, ratio in enumerate(ratios):
        for kind in kinds_of_ratio(ratio):
            size = ITEM_BYTES[kind] * pages
            found.append(Region(layer, kind, base, size, ITEM_BYTES[kind]))
            base += size + 4096
    return RegionTable(found)


def needed(ticket: TransferTicket, ratios: tuple[int, ...], tokens: int) -> Counter[tuple[int, int]]:
    """(address, size) of every piece that a handover must bring: whole pages, and the live rows of slots."""
    handover, found = Handover(tokens), Counter[tuple[int, int]]()
    for layer, ratio in enumerate(ratios):
        for kind in kinds_of_ratio(ratio):
            items = ticket.items_of(kind)
            if kind in (RegionKind.C4, RegionKind.INDEX, RegionKind.C128):
                count = handover.c128_pages if kind is RegionKind.C128 else handover.host_pages
                pieces = [
                    (ticket.regions.address(layer, kind, items[i], 0, ITEM_BYTES[kind]), ITEM_BYTES[kind])
                    for i in range(count)
                ]
            elif kind is RegionKind.WINDOW:
                pieces = [(ticket.regions.address(layer, kind, items[0], offset, size), size)
                          for run in handover.window_runs() for offset, size in WINDOW_PAGE.pieces(run.row, run.count)]  # fmt: skip
            else:
                width = ITEM_BYTES[kind] // (128 if kind is RegionKind.STATE_C128 else 8)
                pieces = [(ticket.regions.address(layer, kind, items[0], run.row * width, run.count * width), run.count * width)
                          for run in handover.state_runs(128 if kind is RegionKind.STATE_C128 else 4)]  # fmt: skip
            found.update(pieces)
    return found


class EmptyKV(SequenceKV):
    """Rows of the right sizes without a model."""

    def window_rows(self, layer: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, 576, dtype=torch.uint8), torch.zeros(count, 8, dtype=torch.uint8)

    def state_rows(self, layer: int, kind: CacheKind, first: int, count: int) -> torch.Tensor:
        return torch.zeros(count, KV_WIDTHS[kind])


CONFIG = ModelConfig.from_dict(small_config())


@given(
    st.lists(st.sampled_from((0, 4, 128)), min_size=1, max_size=7),
    st.integers(1, 1400),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from((256, 512)),
    st.data(),
)
@settings(max_examples=120, deadline=None)
def test_all_ranks_together_send_every_needed_piece_exactly_once(
    ratios_list: list[int], tokens: int, stages: int, ranks: int, chunk: int, data: st.DataObject
):
    ratios = tuple(ratios_list)
    stages = min(stages, len(ratios))
    cuts = data.draw(st.permutations(range(1, len(ratios))))[: stages - 1]
    bounds = [0, *sorted(cuts), len(ratios)]
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    pages = tuple(data.draw(st.permutations(range(8)))[: Handover(tokens).logical_pages])
    ticket = TransferTicket(
        "s", "r", regions(ratios, 8), pages[: Handover(tokens).host_pages], pages, 3, 5, verify=False
    )
    sent: Counter[tuple[int, int]] = Counter()
    for place in places(len(ratios), stages, ranks, sizes):
        ring, kv = SendRing(16 << 20), EmptyKV(CONFIG, cpu_kernels())
        for start in range(0, tokens, chunk):
            plan = ChunkPlan(ratios, tokens, start, min(start + chunk, tokens), place)
            assert {layer for layer, _ in plan.page_offsets()} <= set(place.layers)
            span = ring.take(plan.span_bytes)
            assert span is not None
            outgoing = [outgoing_pages(plan, span, ticket, 0, plan.complete_pages)]
            if plan.is_last:
                outgoing.append(outgoing_rest(plan, span, ticket, kv))
            for part in outgoing:
                sent.update((run.target, run.size) for run in part.runs)
                assert all(
                    span.address <= run.source and run.source + run.size <= span.address + span.size
                    for run in part.runs
                )
            ring.release(span)
    assert sent == needed(ticket, ratios, tokens)


def test_the_shares_of_tensor_ranks_differ_by_at_most_one_page_a_layer():
    ranks = [Place((0, 1, 2), rank, 3) for rank in range(3)]
    assert [place.share_of_pages(0, 8) for place in ranks] == [(0, 3), (3, 3), (6, 2)]
    assert [place.share_of_pages(1, 1)[1] for place in ranks] == [0, 0, 1]
    assert [place.share_of_pages(5, 8)[1] for place in ranks] == [0, 0, 0]
    assert caches_of_ratio(0) == ()
