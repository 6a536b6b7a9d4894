"""Configurations in both spellings, and what they need, computed without allocating it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config

from common.model.config import ConfigError, ModelConfig
from common.model.plan import meta_weights, plan_model, stored_bytes
from common.model.public_configs import FLASH, PRO
from common.model.small_checkpoint import small_config
from common.model.weight_names import WeightSpec, expected_weights


def test_flash_and_pro_parse_with_their_layer_plans():
    flash, pro = ModelConfig.from_dict(FLASH), ModelConfig.from_dict(PRO)
    assert (len(flash.layers_of(0)), len(flash.layers_of(4)), len(flash.layers_of(128))) == (2, 21, 20)
    assert flash.compress_ratios[:5] == (0, 0, 4, 128, 4)
    assert (len(pro.layers_of(0)), len(pro.layers_of(4)), len(pro.layers_of(128))) == (0, 30, 31)
    assert [p.routing for p in plan_model(flash).layers].count("hash") == 3
    assert (flash.index_topk, pro.index_topk) == (512, 1024)


@pytest.mark.parametrize("data", [FLASH, PRO, small_config()], ids=["flash", "pro", "small"])
def test_the_spelling_of_transformers_gives_the_same_configuration(data: dict[str, Any], tmp_path: Path):
    layers = data["num_hidden_layers"]
    written = DeepseekV4Config(**(data | {"compress_ratios": data["compress_ratios"][:layers]})).to_dict()
    assert "layer_types" in written
    assert "compress_ratios" not in written
    for name in ("torch_dtype", "dtype"):
        written.pop(name, None)
    assert ModelConfig.from_dict(written) == ModelConfig.from_dict(data)


def test_shapes_of_flash_are_the_published_ones():
    weights = expected_weights(ModelConfig.from_dict(FLASH))
    expected = {
        "embed.weight": (129280, 4096),
        "hc_head_fn": (4, 16384),
        "layers.2.hc_attn_fn": (24, 16384),
        "layers.2.attn.wq_b.weight": (32768, 1024),
        "layers.2.attn.wo_a.weight": (8192, 4096),
        "layers.2.attn.wo_b.weight": (4096, 8192),
        "layers.2.attn.compressor.wkv.weight": (1024, 4096),
        "layers.2.attn.compressor.ape": (4, 1024),
        "layers.3.attn.compressor.wkv.weight": (512, 4096),
        "layers.3.attn.compressor.ape": (128, 512),
        "layers.2.attn.indexer.wq_b.weight": (8192, 1024),
        "layers.2.attn.indexer.compressor.wkv.weight": (256, 4096),
        "layers.0.ffn.gate.tid2eid": (129280, 6),
        "layers.3.ffn.gate.bias": (256,),
        "layers.3.ffn.experts.255.w1.weight": (2048, 4096),
        "layers.3.ffn.shared_experts.w2.weight": (4096, 2048),
    }
    assert {name: weights[name].shape for name in expected} == expected
    assert "layers.3.attn.indexer.wq_b.weight" not in weights
    assert "layers.0.attn.compressor.wkv.weight" not in weights
    assert "layers.3.ffn.gate.tid2eid" not in weights
    assert not any(name.startswith("layers.43.") for name in weights)


def test_memory_of_flash_is_hand_arithmetic_and_nothing_is_allocated():
    config = ModelConfig.from_dict(FLASH)
    assert stored_bytes(WeightSpec((2048, 4096), "expert")) == 2048 * 2048 + 2048 * 128
    assert stored_bytes(WeightSpec((32768, 1024), "fp8")) == 32768 * 1024 + 256 * 8
    plan = plan_model(config)
    experts = 43 * 256 * 3 * 2048 * 4096
    assert 280e9 < plan.parameters < 300e9
    assert experts * 17 / 32 < plan.weight_bytes < experts * 17 / 32 * 1.1
    assert plan.host_bytes_per_token == 21 * 146.25
    assert plan.device_bytes_per_token == 21 * 33 + 20 * 6.75
    weights = meta_weights(config)
    assert all(weight.device == torch.device("meta") for weight in weights.values())
    assert sum(layer.weight_bytes for layer in plan.layers) < plan.weight_bytes
    assert plan_model(ModelConfig.from_dict(PRO)).parameters > 1.4e12


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"hidden_size": None}, ["hidden_size"]),
        ({"compress_ratios": None}, ["compress_ratios"]),
        ({"compress_ratios": [0, 4]}, ["2 layers", "num_hidden_layers = 5"]),
        ({"compress_ratios": [0, 4, 128, 8, 4]}, ["compress_ratios", "8"]),
        ({"compress_ratios": [0, 4, 128, 4, 4], "layer_types": ["sliding_attention"] * 5}, ["compress_ratios", "layer_types", "contradict"]),
        ({"layer_types": ["full_attention"] * 5}, ["layer_types", "full_attention"]),
        ({"scoring_func": "sigmoid"}, ["scoring_func", "sigmoid", "sqrtsoftplus"]),
        ({"model_type": "deepseek_v3"}, ["model_type", "deepseek_v3"]),
        ({"rope_scaling": None}, ["rope_scaling"]),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ["rope_scaling", "linear"]),
        ({"qk_rope_head_dim": 63}, ["qk_rope_head_dim = 63"]),
        ({"o_groups": 3}, ["num_attention_heads = 4", "o_groups = 3"]),
        ({"num_experts_per_tok": 7}, ["num_experts_per_tok = 7", "n_routed_experts = 6"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps = 0"]),
        ({"hidden_size": True}, ["hidden_size = True"]),
        ({"hidden_size": 4.5}, ["hidden_size = 4.5"]),
        ({"hidden_size": -1}, ["hidden_size = -1"]),
        ({"num_local_experts": 8}, ["n_routed_experts = 6", "num_local_experts = 8"]),
        ({"eos_token_id": 260}, ["eos_token_id = 260", "vocab_size = 260"]),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"]}, ["mlp_layer_types"]),
        ({"mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 3}, ["num_hash_layers = 1", "mlp_layer_types has 2"]),
        ({"partial_rotary_factor": 0.25}, ["qk_rope_head_dim = 64", "partial_rotary_factor = 0.25"]),
    ],
)  # fmt: skip
def test_missing_and_contradictory_fields_are_named_with_their_values(changes: dict[str, Any], names: list[str]):
    data = {name: value for name, value in small_config(**changes).items() if value is not None}
    with pytest.raises(ConfigError) as raised:
        ModelConfig.from_dict(data)
    for name in names:
        assert name in str(raised.value)


def test_eps_is_read_and_never_assumed():
    assert ModelConfig.from_dict(small_config(rms_norm_eps=1e-20)).rms_norm_eps == 1e-20


def test_files_that_are_missing_or_no_json_are_errors(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        ModelConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        ModelConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="holds a list"):
        ModelConfig.from_file(tmp_path)


@pytest.mark.parametrize("module", ["common.model.config", "common.model.tokenizer", "router_service.main"])
def test_configuration_tokenizer_and_router_need_no_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
