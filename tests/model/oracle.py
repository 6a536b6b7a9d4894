"""The independent implementation that tests compare with: `transformers`, fp32, eager attention, same weights."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from common.model.config import ModelConfig

LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def transformers_config(config: ModelConfig) -> DeepseekV4Config:
    return DeepseekV4Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.moe_intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        q_lora_rank=config.q_lora_rank,
        num_experts_per_tok=config.experts_per_token,
        n_routed_experts=config.num_experts,
        n_shared_experts=config.shared_experts,
        routed_scaling_factor=config.routed_scaling_factor,
        max_position_embeddings=config.max_positions,
        rope_theta=config.rope_theta,
        layer_types=[LAYER_TYPES[ratio] for ratio in config.compress_ratios],
        compress_rope_theta=config.compress_rope_theta,
        hc_mult=config.hc_mult,
        hc_sinkhorn_iters=config.hc_sinkhorn_iters,
        hc_eps=config.hc_eps,
        mlp_layer_types=["hash_moe" if layer < config.num_hash_layers else "moe" for layer in range(config.num_layers)],
        swiglu_limit=config.swiglu_limit,
        sliding_window=config.sliding_window,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        index_n_heads=config.index_heads,
        index_head_dim=config.index_head_dim,
        index_topk=config.index_topk,
        rms_norm_eps=config.rms_norm_eps,
        qk_rope_head_dim=config.rope_dim,
        rope_parameters={
            "rope_type": "yarn",
            "factor": config.rope_factor,
            "beta_fast": config.rope_beta_fast,
            "beta_slow": config.rope_beta_slow,
            "original_max_position_embeddings": config.rope_original_positions,
        },
        tie_word_embeddings=False,
        attn_implementation="eager",
    )


def transformers_weights(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Native names to those of the `transformers` module tree; experts stacked, gate rows above up rows."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ".experts." in name:
            continue
        new = name
        for old, replacement in (
            (".attn_norm.", ".input_layernorm."),
            (".ffn_norm.", ".post_attention_layernorm."),
            (".hc_attn_", ".attn_hc."),
            (".hc_ffn_", ".ffn_hc."),
            (".indexer.wq_b.", ".compressor.indexer.q_b_proj."),
            (".indexer.weights_proj.", ".compressor.indexer.scorer.weights_proj."),
            (".indexer.compressor.", ".compressor.indexer."),
            (".attn_sink", ".sinks"),
            (".wq_a.", ".q_a_proj."),
            (".q_norm.", ".q_a_norm."),
            (".wq_b.", ".q_b_proj."),
            (".wo_a.", ".o_a_proj."),
            (".wo_b.", ".o_b_proj."),
            (".gate.bias", ".gate.e_score_correction_bias"),
            (".shared_experts.w1.", ".shared_experts.gate_proj."),
            (".shared_experts.w2.", ".shared_experts.down_proj."),
            (".shared_experts.w3.", ".shared_experts.up_proj."),
            (".attn.", ".self_attn."),
            (".ffn.", ".mlp."),
        ):
            new = new.replace(old, replacement)
        if ".compressor." in new:
            new = new.replace(".wkv.", ".kv_proj.").replace(".wgate.", ".gate_proj.")
            new = new.replace(".ape", ".position_bias").replace(".norm.", ".kv_norm.")
        else:
            new = new.replace(".wkv.", ".kv_proj.")
        if new == "head.weight":
            renamed["lm_head.weight"] = tensor
            continue
        if new.startswith("hc_head_"):
            new = "hc_head.hc_" + new.removeprefix("hc_head_")
        renamed["model." + new.replace("embed.", "embed_tokens.")] = tensor
    for layer in range(config.num_layers):
        experts = [f"layers.{layer}.ffn.experts.{index}" for index in range(config.num_experts)]
        renamed[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat((weights[f"{e}.w1.weight"], weights[f"{e}.w3.weight"])) for e in experts]
        )
        renamed[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(
            [weights[f"{e}.w2.weight"] for e in experts]
        )
    return renamed


def transformers_model(config: ModelConfig, weights: dict[str, Tensor]) -> DeepseekV4ForCausalLM:
    model = DeepseekV4ForCausalLM(transformers_config(config)).float().eval()
    model.load_state_dict(transformers_weights(config, weights), strict=True)
    return model


class Oracle:
    """Logits of one set of weights, each text computed once over its whole length."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        self._model = transformers_model(config, weights)
        self._cached = lru_cache(maxsize=64)(self._compute)

    def logits(self, token_ids: list[int]) -> Tensor:
        """[T, vocab] fp32 for the text from its first token."""
        return self._cached(tuple(token_ids))

    def _compute(self, token_ids: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            return self._model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
