"""What a configuration needs, without allocating any of it: layers, weights, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.kv.layout import C4_PAGE, C128_PAGE, INDEX_PAGE, LOGICAL_PAGE_TOKENS
from common.model.config import ModelConfig
from common.model.quantised_weight import FP4_GROUP, FP8_BLOCK
from common.model.weight_names import WeightSpec, expected_weights

_WIDTHS = {"bf16": 2, "fp32": 4, "int64": 8}
# Matrices that ranks divide: by vocabulary, by head, by output group, by inner width.
_DIVIDED = (
    "embed.weight", "head.weight", "attn.wq_b.weight", "attn.wo_a.weight", "attn.wo_b.weight", "attn.attn_sink",
    "indexer.wq_b.weight", "shared_experts.w1.weight", "shared_experts.w2.weight", "shared_experts.w3.weight",
)  # fmt: skip
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int64": torch.int64}


@dataclass(frozen=True)
class LayerPlan:
    layer: int
    ratio: int
    routing: Literal["hash", "learned"]
    weight_bytes: int
    parameters: int


@dataclass(frozen=True)
class ModelPlan:
    """Bytes are as the public checkpoints store weights; KV bytes are per token of context, over all layers."""

    layers: tuple[LayerPlan, ...]
    weight_bytes: int
    parameters: int
    host_bytes_per_token: float
    device_bytes_per_token: float


def stored_bytes(spec: WeightSpec, expert_format: Literal["fp4", "fp8"] = "fp4") -> int:
    """Bytes of a weight with its scales."""
    count = 1
    for size in spec.shape:
        count *= size
    if spec.stored_as in _WIDTHS:
        return count * _WIDTHS[spec.stored_as]
    if spec.stored_as == "expert" and expert_format == "fp4":
        return count // 2 + count // FP4_GROUP
    rows, columns = spec.shape
    return count + -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)


def meta_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Every weight as a tensor of its shape on the meta device: nothing is allocated."""
    return {
        name: torch.empty(spec.shape, dtype=_DTYPES.get(spec.stored_as, torch.float8_e4m3fn), device="meta")
        for name, spec in expected_weights(config).items()
    }


def plan_model(config: ModelConfig, expert_format: Literal["fp4", "fp8"] = "fp4") -> ModelPlan:
    weights = expected_weights(config)
    layers: list[LayerPlan] = []
    for layer, ratio in enumerate(config.compress_ratios):
        mine = [spec for name, spec in weights.items() if name.startswith(f"layers.{layer}.")]
        layers.append(
            LayerPlan(
                layer,
                ratio,
                "hash" if layer < config.num_hash_layers else "learned",
                sum(stored_bytes(spec, expert_format) for spec in mine),
                sum(_parameters(spec) for spec in mine),
            )
        )
    c4, c128 = len(config.layers_of(4)), len(config.layers_of(128))
    return ModelPlan(
        layers=tuple(layers),
        weight_bytes=sum(stored_bytes(spec, expert_format) for spec in weights.values()),
        parameters=sum(_parameters(spec) for spec in weights.values()),
        host_bytes_per_token=c4 * C4_PAGE.page_bytes / LOGICAL_PAGE_TOKENS,
        device_bytes_per_token=(c4 * INDEX_PAGE.page_bytes + c128 * C128_PAGE.page_bytes) / LOGICAL_PAGE_TOKENS,
    )


def rank_bytes(config: ModelConfig, ranks: int, expert_format: Literal["fp4", "fp8"] = "fp4") -> int:
    """Weight bytes of the largest of `ranks` expert- and tensor-parallel ranks, as stored: routed experts, the
    vocabulary, heads and the shared expert are divided (rounded up to a whole expert, head or row), everything else is
    on every rank. Raises ValueError for fewer than one."""
    if ranks < 1:
        raise ValueError(f"{ranks} ranks")
    total = 0
    experts = -(-config.num_experts // ranks)
    for name, spec in expected_weights(config).items():
        size = stored_bytes(spec, expert_format)
        if ".ffn.experts." in name:
            index = int(name.split(".ffn.experts.")[1].split(".")[0])
            total += size if index < experts else 0
        elif name.endswith(_DIVIDED):
            total += -(-size // min(ranks, spec.shape[0]))
        else:
            total += size
    return total


def _parameters(spec: WeightSpec) -> int:
    if spec.stored_as == "int64":
        return 0
    count = 1
    for size in spec.shape:
        count *= size
    return count
