"""Each part of the model against its definition, written out slowly."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.model.activations import sigmoid, silu_, sqrt_softplus
from common.model.compressor import Compressor
from common.model.hyper_connection import sinkhorn, sinkhorn_factors
from common.model.indexer import decode_selection, first_entries
from common.model.moe import Experts
from common.model.panels import FEW_ROWS, cut, dividing_panel, lone_panel, product
from common.model.rope import Rotary, plain_frequencies, rotate_, yarn_frequencies
from common.model.routing import top_experts
from common.model.selection import top_entries, top_mask
from common.model.weights import WeightReader
from tests.support.small_configs import random_weights, small_config


def test_activations_follow_their_definitions() -> None:
    x = torch.linspace(-60, 60, 1001)
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x))
    torch.testing.assert_close(silu_(x.clone()), F.silu(x))
    torch.testing.assert_close(sqrt_softplus(x), F.softplus(x).sqrt())


def test_activations_at_the_ends_of_the_range() -> None:
    x = torch.tensor([-1000.0, -200.0, -120.0, 200.0, 1000.0])
    assert torch.equal(sigmoid(x)[[0, -1]], torch.tensor([0.0, 1.0]))
    assert torch.equal(silu_(x.clone())[[0, -1]], torch.tensor([-0.0, 1000.0]))
    roots = sqrt_softplus(x)
    assert bool((roots[1:3] > 0).all()), "softplus is zero there, its root is not"
    torch.testing.assert_close(roots[2].double(), torch.tensor(math.exp(-60.0), dtype=torch.float64), rtol=1e-5, atol=0)
    assert bool(torch.isfinite(roots).all())


def test_yarn_of_the_public_configuration() -> None:
    """Pairs up to 15 keep their frequency, from 25 on they are 16 times slower, halfway in between."""
    plain, yarn = plain_frequencies(160000.0, 64), yarn_frequencies(160000.0, 64, 16.0, 32.0, 1.0, 65536)
    assert torch.equal(yarn[:16], plain[:16])
    torch.testing.assert_close(yarn[25:], plain[25:] / 16)
    torch.testing.assert_close(yarn[20], plain[20] * 0.5 + plain[20] / 32)


def test_rotation_turns_the_last_channels_as_pairs() -> None:
    config = small_config()
    rotary = Rotary(config, torch.device("cpu"))
    positions = torch.tensor([0, 1, 77, 1_000_000])
    x = torch.randn(4, 3, config.head_dim, generator=torch.Generator().manual_seed(0))
    turned = rotate_(x.clone(), rotary.at(positions, 0).forward)
    assert torch.equal(turned[..., : -config.rope_dim], x[..., : -config.rope_dim])
    frequencies = plain_frequencies(config.rope_theta, config.rope_dim)
    start = config.head_dim - config.rope_dim
    for row, position in enumerate(positions.tolist()):
        for pair in range(config.rope_dim // 2):
            angle = float(torch.tensor(float(position)) * frequencies[pair])
            a, b = x[row, :, start + 2 * pair], x[row, :, start + 2 * pair + 1]
            expected = torch.stack(
                (a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)), -1
            )
            torch.testing.assert_close(turned[row, :, start + 2 * pair : start + 2 * pair + 2], expected)
    torch.testing.assert_close(rotate_(turned, rotary.at(positions, 0).backward), x)
    assert not torch.equal(rotary.at(positions, 0).forward, rotary.at(positions, 4).forward)


@pytest.mark.parametrize("iterations", [1, 2, 8, 20])
def test_sinkhorn_forms(iterations: int) -> None:
    eps = 1e-6
    logits = torch.randn(37, 4, 4, generator=torch.Generator().manual_seed(1)) * 3
    start = torch.softmax(logits.double(), -1) + eps
    expected = start / (start.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        expected = expected / (expected.sum(-1, keepdim=True) + eps)
        expected = expected / (expected.sum(-2, keepdim=True) + eps)
    expected = expected.transpose(1, 2).float()
    for found in (
        sinkhorn(start.float(), iterations, torch.tensor([eps])),
        sinkhorn_factors(start.float(), iterations, eps),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.sum(2), torch.ones(37, 4), rtol=0, atol=1e-3)


def slow_top(row: list[float], count: int) -> list[int]:
    return sorted(sorted(range(len(row)), key=lambda index: (-row[index], index))[:count])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_selection_prefers_the_lowest_entry_among_equals(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 24))
    count = data.draw(st.integers(1, width))
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, float("-inf")])
    rows = data.draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=1, max_size=4))
    scores = torch.tensor(rows)
    expected = [slow_top(row, count) for row in rows]
    assert top_entries(scores, count).tolist() == expected
    assert [mask.nonzero().flatten().tolist() for mask in top_mask(scores, count)] == expected


def test_decode_selection_of_sequences_of_different_sizes() -> None:
    generator = torch.Generator().manual_seed(2)
    counts, topk = [3, 200, 0, 16, 17], 16
    keys = [torch.randn(-(-count // 64) * 64, 8, generator=generator) for count in counts]
    queries, weights = torch.randn(5, 4, 8, generator=generator), torch.randn(5, 4, generator=generator)
    found = decode_selection(queries, weights, keys, torch.tensor(counts), first_entries(torch.tensor(counts), topk))
    for b, count in enumerate(counts):
        if count <= topk:
            assert found[b].tolist() == list(range(count)) + [-1] * (topk - count)
        else:
            scores = (torch.relu(queries[b] @ keys[b][:count].t()) * weights[b].unsqueeze(1)).sum(0)
            assert found[b].tolist() == slow_top(scores.tolist(), topk)


def slow_entry(rows: Tensor, w: int, ratio: int, width: int) -> Tensor:
    """Entry w before norm and rotation from raw rows [T, row width] of positions 0, 1, ..."""
    values: list[Tensor] = []
    gates: list[Tensor] = []
    if ratio == 128:
        for t in range(128 * w, 128 * w + 128):
            values.append(rows[t, :width])
            gates.append(rows[t, width:])
    else:
        for t in range(max(0, 4 * w - 4), 4 * w):
            values.append(rows[t, :width])
            gates.append(rows[t, 2 * width : 3 * width])
        for t in range(4 * w, 4 * w + 4):
            values.append(rows[t, width : 2 * width])
            gates.append(rows[t, 3 * width :])
    return (torch.softmax(torch.stack(gates), 0) * torch.stack(values)).sum(0)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize(
    ("length", "added"), [(0, 3), (0, 4), (0, 9), (3, 1), (5, 6), (126, 2), (127, 140), (256, 128)]
)
def test_compressor_windows(ratio: int, length: int, added: int) -> None:
    width, total = 32, length + added
    generator = torch.Generator().manual_seed(length)
    ape = torch.randn(ratio, width * (2 if ratio == 4 else 1), generator=generator)
    compressor = Compressor(ratio, width, ape, torch.ones(width), 1e-6)
    rows = torch.randn(total, compressor.row_width, generator=generator)
    phase = torch.arange(total) % ratio
    biased = compressor.add_position_bias_(rows.clone(), phase)
    for t in range(total):
        assert torch.equal(biased[t, : ape.shape[1]], rows[t, : ape.shape[1]])
        assert torch.equal(biased[t, ape.shape[1] :], rows[t, ape.shape[1] :] + ape[t % ratio])
    first = max(0, 4 * (length // 4) - 4) if ratio == 4 else 128 * (length // 128)
    born = range(length // ratio, total // ratio)
    turn = torch.ones(len(born), 8, dtype=torch.complex64)
    found = compressor.prefill(biased[first:], length, added, turn)
    assert found.shape == (len(born), width)
    for index, w in enumerate(born):
        expected = slow_entry(biased, w, ratio, width)
        expected = expected / torch.sqrt(expected.square().mean() + 1e-6)
        torch.testing.assert_close(found[index], expected)
        depth = 8 if ratio == 4 else 128
        window = torch.zeros(depth, compressor.row_width)
        window[:, compressor.row_width // 2 :] = -torch.inf
        end = (w + 1) * ratio
        seen = biased[max(0, end - depth) : end]
        window[depth - seen.shape[0] :] = seen
        torch.testing.assert_close(compressor.decode(window.unsqueeze(0), turn[:1])[0], expected)


@pytest.mark.parametrize("rows", [8, 64, FEW_ROWS + 8])
@pytest.mark.parametrize(("outputs", "width"), [(6, 96), (24, 64), (128, 48), (300, 128), (1024, 33)])
def test_panels_give_the_bits_of_one_product(rows: int, outputs: int, width: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    matrix = torch.randn(outputs, width, generator=generator)
    x = torch.randn(rows, width, generator=generator)
    padded = torch.cat((matrix, torch.zeros(-outputs % 128, width)))
    found = product(x, cut(matrix, lone_panel(outputs)))
    assert torch.equal(found[:, :outputs], F.linear(x, padded)[:, :outputs])


def test_dividing_panel() -> None:
    assert [dividing_panel(columns) for columns in (16, 96, 112, 256, 384, 144)] == [16, 96, 112, 128, 128, 48]


def slow_expert(weights: dict[str, Tensor], name: str, x: Tensor, limit: float | None) -> Tensor:
    gate, up = x @ weights[f"{name}.w1.weight"].t(), x @ weights[f"{name}.w3.weight"].t()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (F.silu(gate) * up) @ weights[f"{name}.w2.weight"].t()


@pytest.mark.parametrize("clamp_shared", [True, False])
@pytest.mark.parametrize("hash_routed", [True, False])
@pytest.mark.parametrize(("inner", "shared", "experts"), [(48, 1, 6), (20, 2, 6), (16, 1, 24)])
def test_experts_one_by_one(inner: int, shared: int, experts: int, hash_routed: bool, clamp_shared: bool) -> None:
    config = small_config(
        moe_intermediate_size=inner,
        shared_experts=shared,
        num_experts=experts,
        clamp_shared_expert=clamp_shared,
        compress_ratios=(0,),
        num_hash_layers=1 if hash_routed else 0,
        swiglu_limit=1.5,
    )
    weights = random_weights(config, 3)
    layer = Experts(reader(weights), "layers.0.ffn", config, hash_routed=hash_routed)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(16, config.hidden_size, generator=generator)
    token_ids = torch.randint(0, config.vocab_size, (16,), generator=generator)
    scores = F.softplus(x @ weights["layers.0.ffn.gate.weight"].t()).sqrt()
    expected = slow_expert(weights, "layers.0.ffn.shared_experts", x, 1.5 if clamp_shared else None)
    for t in range(16):
        if hash_routed:
            chosen = weights["layers.0.ffn.gate.tid2eid"][token_ids[t]]
        else:
            chosen = torch.topk(scores[t] + weights["layers.0.ffn.gate.bias"], config.experts_per_token).indices
        total = scores[t, chosen].sum() + 1e-20
        for expert in chosen.tolist():
            share = config.routed_scaling_factor * scores[t, expert] / total
            expected[t] += share * slow_expert(weights, f"layers.0.ffn.experts.{expert}", x[t], 1.5)
    for decoding in (False, True):
        torch.testing.assert_close(layer(x, token_ids, decoding=decoding), expected, rtol=1e-4, atol=1e-5)


def test_router_scores_that_underflow_give_finite_weights() -> None:
    config = small_config(compress_ratios=(0,), num_hash_layers=0)
    weights = random_weights(config, 3)
    weights["layers.0.ffn.gate.weight"] = torch.full_like(weights["layers.0.ffn.gate.weight"], -3.0)
    layer = Experts(reader(weights), "layers.0.ffn", config, hash_routed=False)
    x = torch.ones(8, config.hidden_size)
    for decoding in (False, True):
        assert bool(torch.isfinite(layer(x, torch.zeros(8, dtype=torch.int64), decoding=decoding)).all())


def test_equal_experts_are_taken_from_the_lowest() -> None:
    assert top_experts(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]]), 3).tolist() == [
        [1, 2, 4],
        [0, 1, 2],
    ]


def reader(weights: dict[str, Tensor]) -> WeightReader:
    return WeightReader(weights, torch.device("cpu"), torch.float32, "at_load")
