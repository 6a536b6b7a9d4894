"""Writes a small, seeded, untrained DeepSeek-V4 in the native format: the same seed gives the same bytes.

Its text means nothing; its rows, pages, layer types and routing are the real ones (head_dim 512, index dim
128, ratios 0, 4 and 128, hash and learned routing), so every path of the system runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.model.config import ModelConfig
from common.model.quantised_weight import QuantisedWeight, quantise_fp4, quantise_fp8
from common.model.weight_names import WeightSpec, expected_weights

Stored = Literal["fp32", "bf16", "fp8", "fp8+fp4"]


def small_config(**changes: Any) -> dict[str, Any]:
    """config.json of the small model in DeepSeek's spelling; keyword arguments replace fields."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 260,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 128,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 64,
        "sliding_window": 128,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "compress_ratios": [0, 4, 128, 4, 4, 0],
        "num_hash_layers": 1,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-6,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        **changes,
    }


def random_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """fp32 weights by native name, scaled so that logits have a standard deviation near 1; nothing that a
    fault could hide behind (biases, position embeddings, sinks, norms) is left at its neutral value."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, spec, config, generator) for name, spec in expected_weights(config).items()}


def _random(name: str, spec: WeightSpec, config: ModelConfig, generator: torch.Generator) -> Tensor:
    if name.endswith("tid2eid"):
        scores = torch.rand(spec.shape[0], config.num_experts, generator=generator)
        return scores.argsort(dim=1)[:, : spec.shape[1]].contiguous()
    noise = torch.randn(spec.shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("_scale"):
        return 0.5 + 0.1 * noise
    if name == "embed.weight":
        return noise
    if name.endswith(("ape", "_base", "attn_sink", "gate.bias")):
        return 0.5 * noise if not name.endswith("gate.bias") else 0.1 * noise
    return noise * spec.shape[-1] ** -0.5


def write_small_checkpoint(
    directory: Path, seed: int = 0, stored: Stored = "fp8", config: dict[str, Any] | None = None
) -> None:
    """Writes config.json and model.safetensors (native names) into `directory`, made if need be.

    `stored` says how the matrices are kept: "fp8" in 128 x 128 blocks with e8m0 scales, "fp8+fp4" with MXFP4
    experts, as the public checkpoints do.
    """
    data = config or small_config()
    parsed = ModelConfig.from_dict(data)
    tensors: dict[str, Tensor] = {}
    specs = expected_weights(parsed)
    for name, weight in random_weights(parsed, seed).items():
        tensors |= stored_tensors(name, weight, specs[name], stored)
    if stored.startswith("fp8"):
        data = data | {
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128],
            }
        }
    if stored == "fp8+fp4":
        data["expert_dtype"] = "fp4"
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def stored_tensors(name: str, weight: Tensor, spec: WeightSpec, stored: Stored) -> dict[str, Tensor]:
    """One weight as the tensors that a checkpoint keeps for it: itself, or blocks and scales."""
    if spec.stored_as == "int64" or spec.stored_as == "fp32" or stored == "fp32":
        return {name: weight}
    quantised: QuantisedWeight | None = None
    if spec.stored_as == "expert" and stored == "fp8+fp4":
        quantised = quantise_fp4(weight)
    elif spec.stored_as in ("fp8", "expert") and stored.startswith("fp8"):
        quantised = quantise_fp8(weight)
    if quantised is None:
        return {name: weight.to(torch.bfloat16)}
    data = quantised.data.view(torch.int8) if quantised.format == "fp4" else quantised.data
    return {name: data, name.removesuffix(".weight") + ".scale": quantised.scale}
