"""Checkpoints: every stored form, both spellings, shards; and each fault named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4ForCausalLM

from common.model.checkpoint import CheckpointError, load_weights
from common.model.config import ModelConfig
from common.model.model_hash import model_hash
from common.model.quantised_weight import QuantisedWeight, quantise_fp4, quantise_fp8
from common.model.small_checkpoint import random_weights, small_config, write_small_checkpoint
from common.model.weight_names import expected_weights, native_name

TINY = small_config(
    hidden_size=64, num_hidden_layers=3, compress_ratios=[0, 4, 128, 0], num_attention_heads=2, head_dim=96, qk_rope_head_dim=32,
    q_lora_rank=48, o_lora_rank=32, index_n_heads=2, index_head_dim=64, moe_intermediate_size=32, n_routed_experts=3,
)  # fmt: skip
CONFIG = ModelConfig.from_dict(TINY)


def dense(weight: torch.Tensor | QuantisedWeight) -> torch.Tensor:
    return weight.dequantise() if isinstance(weight, QuantisedWeight) else weight.float()


def test_every_fp8_byte_dequantises_to_its_value():
    data = torch.arange(256, dtype=torch.uint8).view(2, 128).view(torch.float8_e4m3fn)
    for scale, factor in ((torch.tensor([[130]], dtype=torch.uint8), 8.0), (torch.tensor([[0.3]]), 0.3)):
        values = QuantisedWeight(data, scale, "fp8").dequantise()
        assert torch.equal(values.nan_to_num(-1), (data.float() * factor).nan_to_num(-1))


def test_every_fp4_code_dequantises_low_nibble_first():
    packed = torch.tensor([[(2 * i) | ((2 * i + 1) << 4) for i in range(8)] * 2], dtype=torch.uint8)
    values = QuantisedWeight(packed, torch.tensor([[128]], dtype=torch.uint8), "fp4").dequantise()
    codes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values[0].tolist() == [2 * v for v in codes + [-v for v in codes]] * 2


@pytest.mark.parametrize("shape", [(128, 128), (200, 130), (5, 300)])
def test_fp8_blocks_at_ragged_edges_are_close_to_the_original(shape: tuple[int, int]):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] *= 100
    made = quantise_fp8(weight)
    assert made.scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert (
        (made.dequantise() - weight).abs() <= weight.abs() / 16 + weight.abs().max() / 448 / 100
    ).float().mean() > 0.99


def test_fp4_is_exact_on_its_own_values():
    weight = torch.tensor([[0, 0.5, -1, 1.5, 2, -3, 4, 6] * 4]) * 4
    assert torch.equal(quantise_fp4(weight).dequantise(), weight)


@pytest.mark.parametrize("stored", ["fp32", "bf16", "fp8", "fp8+fp4"])
def test_a_written_checkpoint_loads_and_keeps_its_stored_form(tmp_path: Path, stored: str):
    write_small_checkpoint(tmp_path, seed=3, stored=stored, config=TINY)  # type: ignore[arg-type]
    weights = load_weights(tmp_path, ModelConfig.from_file(tmp_path))
    assert weights.keys() == expected_weights(CONFIG).keys()
    original = random_weights(CONFIG, 3)
    expert = weights["layers.1.ffn.experts.0.w1.weight"]
    if stored == "fp8+fp4":
        assert isinstance(expert, QuantisedWeight)
        assert expert.format == "fp4"
    if stored.startswith("fp8"):
        matrix = weights["layers.1.attn.wq_b.weight"]
        assert isinstance(matrix, QuantisedWeight)
        assert matrix.data.dtype == torch.float8_e4m3fn
    bounds = {"fp32": 1e-9, "bf16": 0.005, "fp8": 0.04, "fp8+fp4": 0.15}
    for name, weight in weights.items():
        assert (dense(weight) - original[name]).norm() <= bounds[stored] * original[name].float().norm(), name


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(tmp_path: Path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_small_checkpoint(tmp_path / name, seed=seed, config=TINY)
    read = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert read["a"] == read["b"] != read["c"]
    assert model_hash(tmp_path / "a") == model_hash(tmp_path / "b") != model_hash(tmp_path / "c")


def shard(folder: Path, parts: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(parts):
        mine = {name: t for index, (name, t) in enumerate(sorted(tensors.items())) if index % parts == part}
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        save_file(mine, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_load_as_one_file_does(tmp_path: Path):
    write_small_checkpoint(tmp_path, config=TINY)
    whole = load_weights(tmp_path, CONFIG)
    shard(tmp_path, 3)
    parts = load_weights(tmp_path, CONFIG)
    assert all(torch.equal(dense(whole[name]), dense(parts[name])) for name in whole)


def test_transformers_loads_our_checkpoint_and_we_load_its_names(tmp_path: Path):
    write_small_checkpoint(tmp_path / "ours", stored="fp32", config=TINY)
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    theirs = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if "inv_freq" not in name}
    assert any("gate_up_proj" in name for name in theirs)
    (tmp_path / "hf").mkdir()
    save_file(theirs, tmp_path / "hf" / "model.safetensors")
    loaded, original = load_weights(tmp_path / "hf", CONFIG), load_weights(tmp_path / "ours", CONFIG)
    assert all(torch.equal(dense(loaded[name]), dense(original[name])) for name in original)


def test_names_map_both_ways_for_every_weight():
    for name in expected_weights(CONFIG):
        assert native_name(name) == name


def changed(folder: Path, change) -> None:
    write_small_checkpoint(folder, config=TINY)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.attn.wkv.weight"), r"1 missing: layers.1.attn.wkv.weight"),
        (lambda t: t.update({"layers.9.extra": torch.zeros(2)}), r"1 unexpected: layers.9.extra"),
        (lambda t: t.update({"norm.weight": torch.zeros(65)}), r"1 misshapen: norm.weight: .*\(65,\), expected \(64,\)"),
        (lambda t: t.pop("layers.1.attn.wkv.scale"), r"layers.1.attn.wkv.weight: quantised but without a scale tensor"),
        (lambda t: t.update({"layers.1.attn.wkv.scale": torch.ones(2, 2)}), r"scale \(2, 2\), expected \(1, 1\)"),
        (lambda t: t.update({"norm.weight": torch.zeros(64, dtype=torch.int32)}), r"norm.weight: torch.int32 where bf16 was expected"),
        (lambda t: t.update({"layers.0.ffn.gate.tid2eid": torch.zeros(260, 2)}), r"expected int64"),
    ],
)  # fmt: skip
def test_missing_extra_and_misshapen_tensors_are_listed(tmp_path: Path, change, message: str):
    changed(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path, CONFIG)


def test_long_lists_are_cut_with_a_count(tmp_path: Path):
    changed(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".experts." in name])
    with pytest.raises(CheckpointError, match=r"27 missing: .* and 7 more"):
        load_weights(tmp_path, CONFIG)


def test_the_mtp_block_is_left_out(tmp_path: Path):
    changed(tmp_path, lambda t: t.update({"mtp.0.enorm.weight": torch.zeros(4)}))
    assert "mtp.0.enorm.weight" not in load_weights(tmp_path, CONFIG)


def test_broken_files_are_errors_that_name_them(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"holds no .safetensors file"):
        load_weights(tmp_path, CONFIG)
    write_small_checkpoint(tmp_path, config=TINY)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors can't be read"):
        load_weights(tmp_path, CONFIG)


def test_an_index_that_promises_more_than_there_is_is_an_error(tmp_path: Path):
    write_small_checkpoint(tmp_path, config=TINY)
    shard(tmp_path, 2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="promises tensors that their shards lack: ghost"):
        load_weights(tmp_path, CONFIG)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="shards that are not there: model-00002"):
        load_weights(tmp_path, CONFIG)
