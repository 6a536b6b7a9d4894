"""Small configurations and random, non-trivial weights under native names, for tests and measurements."""

from __future__ import annotations

import torch
from torch import Tensor

from common.model.config import ModelConfig


def small_config(**overrides: object) -> ModelConfig:
    """Every layer type, hash and learned routing, small widths; any field can be replaced.

    `num_layers` follows `compress_ratios`.
    """
    fields: dict[str, object] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_heads": 4,
        "head_dim": 64,
        "rope_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 24,
        "index_heads": 16,
        "index_head_dim": 32,
        "index_topk": 512,
        "sliding_window": 128,
        "num_experts": 6,
        "experts_per_token": 2,
        "moe_intermediate_size": 48,
        "shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "compress_ratios": (0, 4, 128, 4),
        "num_hash_layers": 1,
        "rms_norm_eps": 1e-6,
        "swiglu_limit": 10.0,
        "clamp_shared_expert": True,
        "rope_theta": 1e4,
        "compress_rope_theta": 1.6e5,
        "rope_factor": 16.0,
        "rope_beta_fast": 32.0,
        "rope_beta_slow": 1.0,
        "rope_original_positions": 65536,
        "max_positions": 1048576,
        "bos_token_id": 0,
        "eos_token_id": (1,),
    }
    fields.update(overrides)
    ratios = fields["compress_ratios"]
    if not isinstance(ratios, tuple):
        raise ValueError(f"compress_ratios is {ratios!r}, not a tuple")
    fields["num_layers"] = len(ratios)
    return ModelConfig(**fields)  # type: ignore[arg-type]


def full_row_config(**overrides: object) -> ModelConfig:
    """The true row widths (head_dim 512 with 64 rotary, index keys of 128) around a small hidden size."""
    widths: dict[str, object] = {
        "head_dim": 512,
        "rope_dim": 64,
        "index_head_dim": 128,
        "index_heads": 16,
        "hidden_size": 96,
        "q_lora_rank": 48,
    }
    return small_config(**(widths | overrides))


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """fp32 weights scaled for activations and logits of order one.

    Everything that an initialiser would leave at zero or one (position biases, sinks, norms, hyper-connection
    bases and scales, router bias, hash table) is random, so that a fault in it shows.
    """
    generator = torch.Generator().manual_seed(seed)
    d, n, head = config.hidden_size, config.hc_mult, config.head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain * columns**-0.5)

    def around(mean: float, std: float, *shape: int) -> Tensor:
        return mean + std * torch.randn(*shape, generator=generator)

    weights: dict[str, Tensor] = {
        "embed.weight": around(0.0, 1.0, config.vocab_size, d),
        "head.weight": matrix(config.vocab_size, d),
        "norm.weight": around(1.0, 0.2, d),
        "hc_head_fn": matrix(n, n * d),
        "hc_head_base": around(0.0, 0.5, n),
        "hc_head_scale": around(1.0, 0.2, 1),
    }

    def compressor(prefix: str, ratio: int, width: int) -> None:
        columns = width * (2 if ratio == 4 else 1)
        weights[f"{prefix}.wkv.weight"] = matrix(columns, d)
        weights[f"{prefix}.wgate.weight"] = matrix(columns, d)
        weights[f"{prefix}.ape"] = around(0.0, 0.7, ratio, columns)
        weights[f"{prefix}.norm.weight"] = around(1.0, 0.2, width)

    for layer, ratio in enumerate(config.compress_ratios):
        base = f"layers.{layer}"
        for part in ("attn", "ffn"):
            weights[f"{base}.{part}_norm.weight"] = around(1.0, 0.2, d)
            weights[f"{base}.hc_{part}_fn"] = matrix((2 + n) * n, n * d)
            weights[f"{base}.hc_{part}_base"] = around(0.0, 0.7, (2 + n) * n)
            weights[f"{base}.hc_{part}_scale"] = around(1.0, 0.2, 3)
        attention = f"{base}.attn"
        weights[f"{attention}.wq_a.weight"] = matrix(config.q_lora_rank, d)
        weights[f"{attention}.q_norm.weight"] = around(1.0, 0.2, config.q_lora_rank)
        weights[f"{attention}.wq_b.weight"] = matrix(config.num_heads * head, config.q_lora_rank)
        weights[f"{attention}.wkv.weight"] = matrix(head, d)
        weights[f"{attention}.kv_norm.weight"] = around(1.0, 0.2, head)
        group_width = config.num_heads * head // config.o_groups
        weights[f"{attention}.wo_a.weight"] = matrix(config.o_groups * config.o_lora_rank, group_width, 2.0)
        weights[f"{attention}.wo_b.weight"] = matrix(d, config.o_groups * config.o_lora_rank)
        weights[f"{attention}.attn_sink"] = around(0.0, 1.0, config.num_heads)
        if ratio:
            compressor(f"{attention}.compressor", ratio, head)
        if ratio == 4:
            indexer = f"{attention}.indexer"
            compressor(f"{indexer}.compressor", 4, config.index_head_dim)
            weights[f"{indexer}.wq_b.weight"] = matrix(config.index_heads * config.index_head_dim, config.q_lora_rank)
            weights[f"{indexer}.weights_proj.weight"] = matrix(config.index_heads, d)
        ffn, inner = f"{base}.ffn", config.moe_intermediate_size
        weights[f"{ffn}.gate.weight"] = matrix(config.num_experts, d, 2.0)
        if layer < config.num_hash_layers:
            order = torch.rand(config.vocab_size, config.num_experts, generator=generator).argsort(1)
            weights[f"{ffn}.gate.tid2eid"] = order[:, : config.experts_per_token].contiguous()
        else:
            weights[f"{ffn}.gate.bias"] = around(0.0, 0.3, config.num_experts)
        experts = [f"{ffn}.experts.{index}" for index in range(config.num_experts)]
        for expert, width in [(name, inner) for name in experts] + [
            (f"{ffn}.shared_experts", inner * config.shared_experts)
        ]:
            # Wide gates: a good part of the activations reaches the clamp.
            weights[f"{expert}.w1.weight"] = matrix(width, d, 4.0)
            weights[f"{expert}.w3.weight"] = matrix(width, d, 4.0)
            weights[f"{expert}.w2.weight"] = matrix(d, width, 0.25)
    return weights
