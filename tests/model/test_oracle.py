"""Logits against an independent implementation: every layer type and routing, lengths around every boundary,
any chunking, then decoding in one batch of different lengths."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from common.model import chunk_selection, indexer, sparse_attention
from common.model.config import ModelConfig
from common.model.model import DeepSeekV4Model, PrefillChunk
from common.model.selection import top_entries, top_mask
from tests.model.oracle import Oracle
from tests.support.local_kv import LocalBatch, LocalSequence
from tests.support.small_configs import full_row_config, random_weights, small_config

TOLERANCE = 1e-4
STEPS = 20
WHOLE = 4096
LENGTH_GROUPS = {
    "1-9": range(1, 10),
    "60-70": range(60, 71),
    "125-131": range(125, 132),
    "252-262": range(252, 263),
    "508-516": range(508, 517),
    "1000": range(1000, 1001),
}
TEXT_TOKENS = 1000 + STEPS


@dataclass(frozen=True)
class Case:
    config: ModelConfig
    model: DeepSeekV4Model
    token_ids: Tensor
    expected: Tensor


def build_case(config: ModelConfig, seed: int) -> Case:
    weights = random_weights(config, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    token_ids = torch.randint(0, config.vocab_size, (TEXT_TOKENS,), generator=generator)
    expected = Oracle(config, weights).logits(token_ids.tolist())
    return Case(config, DeepSeekV4Model(config, weights), token_ids, expected)


@pytest.fixture(scope="module")
def small() -> Case:
    return build_case(small_config(), 0)


@pytest.fixture(scope="module")
def full_rows() -> Case:
    return build_case(full_row_config(compress_ratios=(128, 4, 0), num_hash_layers=2), 1)


def prefilled(case: Case, length: int, chunk: int) -> tuple[LocalSequence, Tensor]:
    """A raw store holding the first `length` tokens, and the logits of all of them."""
    sequence = LocalSequence(case.config, quantise=False)
    logits: list[Tensor] = []
    for start in range(0, length, chunk):
        piece = case.token_ids[start : min(start + chunk, length)]
        (found,) = case.model.prefill([PrefillChunk(piece, sequence, "all")])
        assert found is not None
        logits.append(found)
    return sequence, torch.cat(logits)


def check_group(case: Case, group: str, chunk: int) -> None:
    lengths = list(LENGTH_GROUPS[group])
    sequences: list[LocalSequence] = []
    for length in lengths:
        sequence, logits = prefilled(case, length, chunk)
        assert sequence.length == length
        torch.testing.assert_close(logits, case.expected[:length], rtol=0, atol=TOLERANCE)
        sequences.append(sequence)
    batch = LocalBatch(sequences)
    for _ in range(STEPS):
        positions = batch.positions
        logits = case.model.decode(case.token_ids[positions], batch)
        batch.advance()
        torch.testing.assert_close(logits, case.expected[positions], rtol=0, atol=TOLERANCE)


QUICK = [
    (group, chunk)
    for group in LENGTH_GROUPS
    for chunk in (1, 7, 64, 128, WHOLE)
    if chunk >= 64 or group in ("1-9", "60-70") or (chunk == 7 and group in ("125-131", "252-262"))
]
SLOW = [(group, chunk) for group in LENGTH_GROUPS for chunk in (1, 7, 64, 128, WHOLE) if (group, chunk) not in QUICK]


def test_expected_logits_have_a_scale_of_one(small: Case, full_rows: Case) -> None:
    for case in (small, full_rows):
        assert 0.5 < float(case.expected.std()) < 2.0


@pytest.mark.parametrize(("group", "chunk"), QUICK)
def test_all_layer_types(small: Case, group: str, chunk: int) -> None:
    check_group(small, group, chunk)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "chunk"), SLOW)
def test_all_layer_types_in_tiny_chunks(small: Case, group: str, chunk: int) -> None:
    check_group(small, group, chunk)


@pytest.mark.parametrize(("group", "chunk"), [(group, (64, WHOLE)[i % 2]) for i, group in enumerate(LENGTH_GROUPS)])
def test_true_row_widths(full_rows: Case, group: str, chunk: int) -> None:
    check_group(full_rows, group, chunk)


@pytest.mark.parametrize(("ratios", "hash_layers"), [((0, 0), 0), ((4, 4), 0), ((128, 128), 0), ((4, 128), 2)])
def test_one_layer_type_at_a_time(ratios: tuple[int, ...], hash_layers: int) -> None:
    case = build_case(small_config(compress_ratios=ratios, num_hash_layers=hash_layers), 7)
    for group in ("1-9", "125-131"):
        check_group(case, group, 64)
    check_group(case, "1000", WHOLE)


class Margins:
    """Records how clearly each selection was decided: the score of the last chosen less that of the next."""

    def __init__(self) -> None:
        self.near_ties = 0
        self.decided = 0

    def record(self, scores: Tensor, count: int) -> None:
        if scores.shape[1] > count:
            best = torch.topk(scores, count + 1, dim=-1).values
            contested = best[:, -1] > -torch.inf
            margin = (best[:, -2] - best[:, -1])[contested]
            self.near_ties += int((margin < 1e-5).sum())
            self.decided += int(contested.sum())

    def mask(self, scores: Tensor, count: int) -> Tensor:
        self.record(scores, count)
        return top_mask(scores, count)

    def entries(self, scores: Tensor, count: int) -> Tensor:
        self.record(scores, count)
        return top_entries(scores, count)


@pytest.mark.parametrize("gather", [False, True], ids=["masked", "gathered"])
def test_real_top_k(monkeypatch: pytest.MonkeyPatch, gather: bool) -> None:
    """16 of up to 250 entries. A near-tie may be decided either way and changes everything behind it, so the
    comparison runs up to the first one; the seed is such that most of the text lies before it."""
    margins = Margins()
    monkeypatch.setattr(chunk_selection, "top_mask", margins.mask)
    monkeypatch.setattr(chunk_selection, "top_entries", margins.entries)
    monkeypatch.setattr(indexer, "top_entries", margins.entries)
    monkeypatch.setattr(sparse_attention, "GATHER_FACTOR", 1 if gather else 1000)
    case = build_case(small_config(index_topk=16), 1)
    sequence = LocalSequence(case.config, quantise=False)
    compared = 0
    for start in range(0, 900, 50):
        piece = case.token_ids[start : start + 50]
        (logits,) = case.model.prefill([PrefillChunk(piece, sequence, "all")])
        if margins.near_ties:
            break
        assert logits is not None
        torch.testing.assert_close(logits, case.expected[start : start + 50], rtol=0, atol=TOLERANCE)
        compared = start + 50
    assert compared >= 500
    assert margins.decided > 1000
    margins.near_ties = 0
    sequence, _ = prefilled(case, compared - 50, WHOLE)
    assert margins.near_ties == 0
    batch = LocalBatch([sequence])
    for position in range(compared - 50, compared):
        logits = case.model.decode(case.token_ids[position : position + 1], batch)
        batch.advance()
        torch.testing.assert_close(logits[0], case.expected[position], rtol=0, atol=TOLERANCE)


def test_packed_chunks_of_several_sequences(small: Case) -> None:
    """Different lengths and logits wishes in one call."""
    sequences = [LocalSequence(small.config, quantise=False) for _ in range(4)]
    lengths = (3, 130, 64, 257)
    wishes = ("last", "all", "none", "last")
    logits = small.model.prefill(
        [
            PrefillChunk(small.token_ids[:length], sequence, wish)
            for length, sequence, wish in zip(lengths, sequences, wishes, strict=True)
        ]
    )
    assert logits[2] is None
    for index, expected in ((0, small.expected[2]), (1, small.expected[:130]), (3, small.expected[256])):
        found = logits[index]
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    more = small.model.prefill(
        [
            PrefillChunk(small.token_ids[length : length + 5], sequence, "last")
            for length, sequence in zip(lengths, sequences, strict=True)
        ]
    )
    for found, length in zip(more, lengths, strict=True):
        assert found is not None
        torch.testing.assert_close(found, small.expected[length + 4], rtol=0, atol=TOLERANCE)
