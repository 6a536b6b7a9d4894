"""What the model refuses, what it leaves untouched then, and how it keeps quantised weights."""

from __future__ import annotations

import platform

import pytest
import torch

from common.model.memory import keep_freed_memory
from common.model.model import DeepSeekV4Model, PrefillChunk
from common.model.quantised_weight import QuantisedWeight, quantise_fp4, quantise_fp8
from common.model.weights import Weight
from tests.model.oracle import Oracle
from tests.support.local_kv import LocalBatch, LocalSequence
from tests.support.monolithic import generate
from tests.support.small_configs import full_row_config, random_weights, small_config

CONFIG = small_config(max_positions=64)


@pytest.fixture(scope="module")
def model() -> DeepSeekV4Model:
    return DeepSeekV4Model(CONFIG, random_weights(CONFIG))


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "not \\[T >= 1\\]"),
        ([[1, 2]], "not \\[T >= 1\\]"),
        ([1, 96], "token id 96 is outside the vocabulary of 96"),
        ([1, -1], "token id -1 is outside"),
        ([1] * 65, "ends at 65 tokens; the model has 64"),
    ],
)
def test_bad_chunks_are_named_and_leave_the_store_alone(
    model: DeepSeekV4Model, token_ids: list[int], message: str
) -> None:
    sequence = LocalSequence(CONFIG, quantise=False)
    with pytest.raises(ValueError, match=message):
        model.prefill([PrefillChunk(torch.tensor(token_ids, dtype=torch.int64), sequence)])
    assert sequence.length == 0
    assert sequence.window[0].count == 0


def test_chunks_of_one_store_cannot_share_a_pass(model: DeepSeekV4Model) -> None:
    sequence = LocalSequence(CONFIG, quantise=False)
    with pytest.raises(ValueError, match="share a KV store"):
        model.prefill([PrefillChunk(torch.tensor([1]), sequence), PrefillChunk(torch.tensor([2]), sequence)])
    with pytest.raises(ValueError, match="no chunk"):
        model.prefill([])


def test_bad_decode_steps_are_named(model: DeepSeekV4Model) -> None:
    sequence = LocalSequence(CONFIG, quantise=False)
    model.prefill([PrefillChunk(torch.arange(63), sequence)])
    batch = LocalBatch([sequence])
    with pytest.raises(ValueError, match="both must be \\[B\\]"):
        model.decode(torch.tensor([1, 2]), batch)
    with pytest.raises(ValueError, match="token id 1000"):
        model.decode(torch.tensor([1000]), batch)
    assert model.decode(torch.tensor([1]), batch).shape == (1, CONFIG.vocab_size)
    batch.advance()
    with pytest.raises(ValueError, match="positions reach 64"):
        model.decode(torch.tensor([1]), batch)


@pytest.mark.parametrize(
    "name", ["embed.weight", "layers.1.attn.indexer.wq_b.weight", "layers.3.ffn.experts.5.w2.weight"]
)
def test_missing_and_misshapen_tensors_are_named(name: str) -> None:
    weights = random_weights(CONFIG)
    weights[name] = weights[name][:, :-1]
    with pytest.raises(ValueError, match=f"tensor '{name}' has shape"):
        DeepSeekV4Model(CONFIG, weights)
    del weights[name]
    with pytest.raises(ValueError, match=f"no tensor '{name}'"):
        DeepSeekV4Model(CONFIG, weights)


def test_hash_tables_name_existing_experts() -> None:
    weights = random_weights(CONFIG)
    weights["layers.0.ffn.gate.tid2eid"][5, 1] = CONFIG.num_experts
    with pytest.raises(ValueError, match=r"tid2eid names experts outside 0 \.\.\. 5"):
        DeepSeekV4Model(CONFIG, weights)


def test_unknown_dequantise_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'sometimes'"):
        DeepSeekV4Model(CONFIG, random_weights(CONFIG), dequantise_weights="sometimes")  # type: ignore[arg-type]


def test_quantised_weights_kept_or_rebuilt_or_dense_agree() -> None:
    """FP8 attention matrices and MXFP4 experts: at load, per use, and the same values given dense."""
    config = small_config(hidden_size=128, moe_intermediate_size=64, q_lora_rank=64, compress_ratios=(0, 4, 128))
    stored: dict[str, Weight] = {}
    dense: dict[str, Weight] = {}
    for name, tensor in random_weights(config, 8).items():
        kept: Weight = tensor
        if ".experts." in name:
            kept = quantise_fp4(tensor)
        elif ".attn.w" in name or "shared_experts" in name or name.endswith("indexer.wq_b.weight"):
            kept = quantise_fp8(tensor)
        stored[name] = kept
        dense[name] = kept.dequantise() if isinstance(kept, QuantisedWeight) else kept
    assert sum(isinstance(weight, QuantisedWeight) for weight in stored.values()) > 60
    token_ids = torch.randint(0, config.vocab_size, (140,), generator=torch.Generator().manual_seed(9))
    results: list[torch.Tensor] = []
    for weights, mode in ((dense, "at_load"), (stored, "at_load"), (stored, "per_use")):
        model = DeepSeekV4Model(config, weights, dequantise_weights=mode)
        sequence = LocalSequence(config, quantise=False)
        (prompt,) = model.prefill([PrefillChunk(token_ids[:130], sequence, "all")])
        assert prompt is not None
        batch, steps = LocalBatch([sequence]), [prompt]
        for token in token_ids[130:]:
            steps.append(model.decode(token.unsqueeze(0), batch))
            batch.advance()
        results.append(torch.cat(steps))
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=1e-4)


def test_bf16_products_stay_near_fp32() -> None:
    weights = random_weights(CONFIG)
    token_ids = torch.arange(60)
    found = [
        DeepSeekV4Model(CONFIG, weights, compute_dtype=dtype).prefill(
            [PrefillChunk(token_ids, LocalSequence(CONFIG, quantise=False), "all")]
        )[0]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].dtype == torch.float32
    difference = (found[0] - found[1]).abs()
    assert 0 < float(difference.mean()) < 0.1


def test_monolithic_generation_follows_the_oracle() -> None:
    config = full_row_config()
    weights = random_weights(config, 2)
    model, oracle = DeepSeekV4Model(config, weights), Oracle(config, weights)
    prompt = torch.randint(2, config.vocab_size, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    found = generate(model, prompt, 12, chunk_tokens=64, quantise=False, stop_at_eos=False)
    expected = oracle.logits(prompt + found)[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert found == expected
    quantised = generate(model, prompt, 12, chunk_tokens=64, stop_at_eos=False)
    assert len(quantised) == 12
    assert quantised == generate(model, prompt, 12, chunk_tokens=64, stop_at_eos=False)


def test_generation_stops_behind_the_end_of_sequence() -> None:
    config = small_config(eos_token_id=tuple(range(96)))
    model = DeepSeekV4Model(config, random_weights(config))
    assert len(generate(model, [3, 4, 5], 10, quantise=False)) == 1


def test_allocator_settings_are_taken_by_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
