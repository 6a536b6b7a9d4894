"""A token's bits do not depend on what else is in the batch, for any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.model.activations import sigmoid, silu_, sqrt_softplus
from common.model.config import ModelConfig
from common.model.model import DeepSeekV4Model, PrefillChunk
from common.model.weights import padded_rows
from tests.support.local_kv import LocalBatch, LocalSequence
from tests.support.small_configs import full_row_config, random_weights, small_config

LENGTHS = (130, 1, 127, 515, 256, 3, 66, 254, 9, 383, 128)
STEPS = 6


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


CONFIGS = {
    "quantised rows": (full_row_config(compress_ratios=(0, 4, 128, 4), index_topk=16), True),
    "many experts": (small_config(num_experts=20, experts_per_token=3, index_topk=16), False),
}


def text(config: ModelConfig, index: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randint(0, config.vocab_size, (tokens,), generator=generator)


def prefilled(model: DeepSeekV4Model, index: int, quantise: bool) -> LocalSequence:
    sequence = LocalSequence(model.config, quantise)
    model.prefill([PrefillChunk(text(model.config, index, LENGTHS[index]), sequence, "none")])
    return sequence


def decoded(model: DeepSeekV4Model, members: list[int], quantise: bool) -> dict[int, Tensor]:
    """Logits [STEPS, vocab] of every member, decoded together."""
    batch = LocalBatch([prefilled(model, index, quantise) for index in members])
    texts = [text(model.config, index, LENGTHS[index] + STEPS) for index in members]
    found: list[Tensor] = []
    for step in range(STEPS):
        tokens = torch.stack([ids[LENGTHS[i] + step] for i, ids in zip(members, texts, strict=True)])
        found.append(model.decode(tokens, batch))
        batch.advance()
    stacked = torch.stack(found, 1)
    return {index: stacked[row] for row, index in enumerate(members)}


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", CONFIGS)
def test_decode_alone_and_with_others(name: str) -> None:
    config, quantise = CONFIGS[name]
    model = DeepSeekV4Model(config, random_weights(config, 5))
    alone = {index: decoded(model, [index], quantise)[index] for index in range(len(LENGTHS))}
    for members in ([0, 1], [4, 0, 3, 2, 5], [7, 6, 5, 4, 3, 2, 1, 0], list(range(len(LENGTHS)))):
        for index, logits in decoded(model, members, quantise).items():
            assert torch.equal(logits, alone[index]), f"sequence {index} differs in batch {members}"


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_alone_and_packed(name: str) -> None:
    config, quantise = CONFIGS[name]
    model = DeepSeekV4Model(config, random_weights(config, 6))

    def chunks(members: list[int]) -> dict[int, Tensor]:
        sequences = {index: LocalSequence(config, quantise) for index in members}
        found: dict[int, list[Tensor]] = {index: [] for index in members}
        for start in range(0, max(LENGTHS), 128):
            going = [index for index in members if start < LENGTHS[index]]
            if not going:
                break
            pieces = [
                PrefillChunk(text(config, index, LENGTHS[index])[start : start + 128], sequences[index], "all")
                for index in going
            ]
            for index, logits in zip(going, model.prefill(pieces), strict=True):
                assert logits is not None
                found[index].append(logits)
        return {index: torch.cat(parts) for index, parts in found.items()}

    alone = {index: chunks([index])[index] for index in range(len(LENGTHS))}
    for members in ([1, 0], [5, 3, 0], list(range(len(LENGTHS)))):
        for index, logits in chunks(members).items():
            assert torch.equal(logits, alone[index]), f"sequence {index} differs in pack {members}"


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("width", "outputs"), [(64, 6), (1024, 24), (256, 1000), (96, 2048), (192, 7)])
def test_dense_rows_in_multiples_of_eight(width: int, outputs: int) -> None:
    """The property of the product library that the padding relies on."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(2056, width, generator=generator)
    weight = torch.randn(outputs, width, generator=generator)
    expected = F.linear(x[:8], weight)
    for rows in (8, 16, 24, 40, 136, 1000, 2048):
        for offset in (0, 5):
            product = F.linear(x[offset : offset + rows], weight)
            assert torch.equal(product[: 8 - offset], expected[offset:])
            assert torch.equal(product[-8:], F.linear(x[offset + rows - 8 : offset + rows], weight))


@pytest.mark.usefixtures("_threads")
def test_activations_do_not_depend_on_the_buffer() -> None:
    x = torch.randn(120_000, generator=torch.Generator().manual_seed(1)) * 8
    for function in (sigmoid, sqrt_softplus, lambda part: silu_(part.clone())):
        expected = function(x)
        for count in (1, 3, 6, 15, 17, 24, 33, 1001, 70_001):
            for offset in (0, 1, 5, 4093):
                assert torch.equal(function(x[offset : offset + count]), expected[offset : offset + count])


def test_padded_rows() -> None:
    assert [padded_rows(n) for n in (1, 7, 8, 9, 16, 17)] == [8, 8, 8, 16, 16, 24]
