"""config.json of DeepSeek-V4 Flash and Pro as DeepSeek spells it, from the published tables."""

from typing import Any

_SHARED: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "hc_mult": 4,
    "num_hash_layers": 3,
    "rms_norm_eps": 1e-6,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 1048576,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "o_lora_rank": 1024,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
}

FLASH: dict[str, Any] = _SHARED | {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "index_topk": 512,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
}

PRO: dict[str, Any] = _SHARED | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
    "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0],
}
