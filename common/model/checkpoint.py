"""Reads safetensors checkpoints into tensors and quantised weights, by native name.

One file or shards with an index; native names or transformers'; BF16, FP16, FP32, FP8 blocks (e8m0 or fp32
scales), MXFP4 experts. What is quantised stays so. Whatever is missing, surplus or misshapen is said in one
CheckpointError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.model.config import ModelConfig
from common.model.quantised_weight import FP4_GROUP, FP8_BLOCK, QuantisedWeight
from common.model.weight_names import WeightSpec, expected_weights, native_name

INDEX_NAME = "model.safetensors.index.json"
NAMES_SHOWN = 20
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class CheckpointError(ValueError):
    """The checkpoint can't be read or does not hold what its configuration needs."""


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: its index's shards, or every file. Raises CheckpointError."""
    index = directory / INDEX_NAME
    if index.exists():
        try:
            shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from None
        files = [directory / name for name in sorted(set(shards.values()))]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise CheckpointError(f"{index.name} names shards that are not there: {_shown(missing)}")
        return files
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no .safetensors file")
    return files


def load_weights(directory: Path, config: ModelConfig) -> dict[str, Tensor | QuantisedWeight]:
    """Every weight that `expected_weights(config)` names, on the CPU, in its stored form.

    Raises CheckpointError that lists missing, surplus and misshapen tensors (the first 20 of each).
    """
    raw, skipped = _read(directory)
    if skipped:
        structlog.get_logger().info("multi-token-prediction block not loaded", tensors=skipped)
    expected = expected_weights(config)
    found: dict[str, Tensor | QuantisedWeight] = {}
    misshapen: list[str] = []
    missing: list[str] = []
    for name, spec in expected.items():
        tensor = raw.pop(name, None)
        scale = raw.pop(_scale_name(name), None)
        if tensor is None:
            missing.append(name)
            continue
        try:
            found[name] = _interpret(tensor, scale, spec)
        except ValueError as error:
            misshapen.append(f"{name}: {error}")
    problems = [
        f"{len(names)} {what}: {_shown(names)}"
        for what, names in (("missing", missing), ("unexpected", sorted(raw)), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(f"checkpoint {directory.name} does not fit its config.json; " + "; ".join(problems))
    return found


def _read(directory: Path) -> tuple[dict[str, Tensor], int]:
    """All tensors by native name, stacked experts split, and how many of the MTP block were left out."""
    found: dict[str, Tensor] = {}
    skipped = 0
    promised = _promised(directory)
    for path in checkpoint_files(directory):
        for stored, tensor in _tensors(path):
            promised.get(path.name, set()).discard(stored)
            name = native_name(stored)
            if name.startswith("mtp."):
                skipped += 1
                continue
            for part, value in _split_experts(name, tensor):
                if part in found:
                    raise CheckpointError(f"tensor {part} appears twice, the second time in {path.name}")
                found[part] = value
    lacking = [f"{name} in {shard}" for shard, names in promised.items() for name in sorted(names)]
    if lacking:
        raise CheckpointError(f"{INDEX_NAME} promises tensors that their shards lack: {_shown(lacking)}")
    return found, skipped


def _promised(directory: Path) -> dict[str, set[str]]:
    index = directory / INDEX_NAME
    promised: dict[str, set[str]] = {}
    if index.exists():
        for name, shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            promised.setdefault(shard, set()).add(name)
    return promised


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as reader:  # type: ignore[no-untyped-call]
            handle: Any = reader
            for name in handle.keys():  # noqa: SIM118 - not a dict
                yield name, handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} can't be read: {error}") from None


def _split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """transformers stacks a layer's experts: gate_up_proj [E, 2I, d] (gates first), down_proj [E, d, I]."""
    match = re.fullmatch(
        r"(layers\.\d+\.ffn\.experts)\.(gate_up_proj|down_proj)(?:\.weight|(\.scale|_scale_inv))?", name
    )
    if match is None:
        yield name, tensor
        return
    prefix, kind, scale = match.groups()
    tail = "scale" if scale else "weight"
    for expert, matrix in enumerate(tensor):
        if kind == "down_proj":
            yield f"{prefix}.{expert}.w2.{tail}", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{prefix}.{expert}.w1.{tail}", gate
            yield f"{prefix}.{expert}.w3.{tail}", up


def _scale_name(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"


def _interpret(tensor: Tensor, scale: Tensor | None, spec: WeightSpec) -> Tensor | QuantisedWeight:
    """Raises ValueError that says what the tensor is and what it should be."""
    rows, columns = spec.shape[0], spec.shape[-1]
    if spec.stored_as == "int64":
        if tensor.dtype not in (torch.int64, torch.int32) or tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)}, expected int64 {spec.shape}")
        return tensor.to(torch.int64)
    if tensor.dtype in _FLOATS:
        if tuple(tensor.shape) != spec.shape or scale is not None:
            raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)}, expected {spec.shape} and no scale")
        return tensor
    if tensor.dtype == torch.float8_e4m3fn and spec.stored_as in ("fp8", "expert"):
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        weight = QuantisedWeight(tensor, _checked_scale(scale, blocks), "fp8")
    elif tensor.dtype in (torch.int8, torch.uint8) and spec.stored_as == "expert":
        weight = QuantisedWeight(tensor.view(torch.uint8), _checked_scale(scale, (rows, columns // FP4_GROUP)), "fp4")
    else:
        raise ValueError(f"{tensor.dtype} where {spec.stored_as} was expected")
    if tuple(weight.shape) != spec.shape:
        raise ValueError(f"{weight.format} {tuple(weight.shape)}, expected {spec.shape}")
    return weight


def _checked_scale(scale: Tensor | None, shape: tuple[int, int]) -> Tensor:
    if scale is None:
        raise ValueError("quantised but without a scale tensor")
    if tuple(scale.shape) != shape:
        raise ValueError(f"scale {tuple(scale.shape)}, expected {shape}")
    if scale.dtype not in (torch.float8_e8m0fnu, torch.uint8, torch.float32):
        raise ValueError(f"scale {scale.dtype}, expected e8m0 or fp32")
    return scale


def _shown(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
