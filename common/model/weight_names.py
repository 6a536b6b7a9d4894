"""The tensors a DeepSeek-V4 checkpoint holds: native names, shapes, stored forms, and transformers' names.

Source of names and shapes: DeepSeek-V4-Flash's checkpoint; of the other spelling: transformers'
conversion table for deepseek_v4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from common.model.config import ModelConfig

StoredAs = Literal["bf16", "fp32", "fp8", "expert", "int64"]


@dataclass(frozen=True)
class WeightSpec:
    """Shape [out, in] as computed with, and how the public checkpoints store it: "fp8" in 128 x 128 blocks,
    "expert" in MXFP4 or FP8 blocks. Loading accepts unquantised floats for all but int64."""

    shape: tuple[int, ...]
    stored_as: StoredAs


def expected_weights(config: ModelConfig) -> dict[str, WeightSpec]:
    """Every tensor of the checkpoint but the MTP block's, by native name, in layer order."""
    d, streams = config.hidden_size, config.hc_mult
    flat = streams * d
    found = {
        "embed.weight": WeightSpec((config.vocab_size, d), "bf16"),
        "head.weight": WeightSpec((config.vocab_size, d), "bf16"),
        "norm.weight": WeightSpec((d,), "bf16"),
        "hc_head_fn": WeightSpec((streams, flat), "fp32"),
        "hc_head_base": WeightSpec((streams,), "fp32"),
        "hc_head_scale": WeightSpec((1,), "fp32"),
    }
    mixes = (2 + streams) * streams
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        for kind in ("attn", "ffn"):
            found[f"{prefix}{kind}_norm.weight"] = WeightSpec((d,), "bf16")
            found[f"{prefix}hc_{kind}_fn"] = WeightSpec((mixes, flat), "fp32")
            found[f"{prefix}hc_{kind}_base"] = WeightSpec((mixes,), "fp32")
            found[f"{prefix}hc_{kind}_scale"] = WeightSpec((3,), "fp32")
        found |= {f"{prefix}attn.{k}": v for k, v in _attention(config, config.compress_ratios[layer]).items()}
        found |= {f"{prefix}ffn.{k}": v for k, v in _ffn(config, layer).items()}
    return found


def _attention(config: ModelConfig, ratio: int) -> dict[str, WeightSpec]:
    d, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    low = config.o_groups * config.o_lora_rank
    found = {
        "wq_a.weight": WeightSpec((config.q_lora_rank, d), "fp8"),
        "q_norm.weight": WeightSpec((config.q_lora_rank,), "bf16"),
        "wq_b.weight": WeightSpec((heads * dim, config.q_lora_rank), "fp8"),
        "wkv.weight": WeightSpec((dim, d), "fp8"),
        "kv_norm.weight": WeightSpec((dim,), "bf16"),
        "wo_a.weight": WeightSpec((low, heads * dim // config.o_groups), "fp8"),
        "wo_b.weight": WeightSpec((d, low), "fp8"),
        "attn_sink": WeightSpec((heads,), "fp32"),
    }
    if ratio:
        found |= _compressor("compressor", d, dim, ratio)
    if ratio == 4:
        width = config.index_head_dim
        found["indexer.wq_b.weight"] = WeightSpec((config.index_heads * width, config.q_lora_rank), "fp8")
        found["indexer.weights_proj.weight"] = WeightSpec((config.index_heads, d), "bf16")
        found |= _compressor("indexer.compressor", d, width, ratio)
    return found


def _compressor(prefix: str, d: int, width: int, ratio: int) -> dict[str, WeightSpec]:
    out = (2 if ratio == 4 else 1) * width
    return {
        f"{prefix}.wkv.weight": WeightSpec((out, d), "bf16"),
        f"{prefix}.wgate.weight": WeightSpec((out, d), "bf16"),
        f"{prefix}.ape": WeightSpec((ratio, out), "fp32"),
        f"{prefix}.norm.weight": WeightSpec((width,), "bf16"),
    }


def _ffn(config: ModelConfig, layer: int) -> dict[str, WeightSpec]:
    d, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    found = {"gate.weight": WeightSpec((experts, d), "bf16")}
    if layer < config.num_hash_layers:
        found["gate.tid2eid"] = WeightSpec((config.vocab_size, config.experts_per_token), "int64")
    else:
        found["gate.bias"] = WeightSpec((experts,), "fp32")
    for name, stored in [("shared_experts", "fp8"), *((f"experts.{e}", "expert") for e in range(experts))]:
        form: StoredAs = "fp8" if stored == "fp8" else "expert"
        found[f"{name}.w1.weight"] = WeightSpec((inner, d), form)
        found[f"{name}.w3.weight"] = WeightSpec((inner, d), form)
        found[f"{name}.w2.weight"] = WeightSpec((d, inner), form)
    return found


# From transformers' names to native ones, in this order.
_RENAMES: tuple[tuple[str, str], ...] = (
    (r"^model\.", ""),
    (r"^lm_head\.", "head."),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_(fn|base|scale)$", r"hc_head_\1"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.attn\.compressor\.indexer\.scorer\.weights_proj\.", ".attn.indexer.weights_proj."),
    (r"\.attn\.compressor\.indexer\.q_b_proj\.", ".attn.indexer.wq_b."),
    (r"\.attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"compressor\.kv_proj\.", "compressor.wkv."),
    (r"compressor\.gate_proj\.", "compressor.wgate."),
    (r"compressor\.position_bias$", "compressor.ape"),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"\.attn\.sinks$", ".attn.attn_sink"),
    (r"\.attn\.q_a_proj\.", ".attn.wq_a."),
    (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
    (r"\.attn\.q_b_proj\.", ".attn.wq_b."),
    (r"\.attn\.kv_proj\.", ".attn.wkv."),
    (r"\.attn\.o_a_proj\.", ".attn.wo_a."),
    (r"\.attn\.o_b_proj\.", ".attn.wo_b."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.weight_scale_inv$", ".scale"),
)


def native_name(name: str) -> str:
    """A tensor's native name, from either spelling. The stacked experts of transformers
    (`experts.gate_up_proj`, `experts.down_proj`) keep their tail: the loader splits them."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name
