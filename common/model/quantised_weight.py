"""Weights as checkpoints store them: FP8 in 128 x 128 blocks, MXFP4 in rows of 32; and their values.

FP8:   W = e4m3(byte) * scale[row // 128, column // 128], scales e8m0 (2^(byte - 127)) or fp32
MXFP4: W = e2m1(nibble) * 2^(scale byte - 127), one scale for 32 columns, low nibble = even column
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FP8_BLOCK = 128
FP4_GROUP = 32
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class QuantisedWeight:
    """`data` [out, in] float8_e4m3fn or [out, in / 2] uint8 (fp4); `scale` per block, as stored."""

    data: Tensor
    scale: Tensor
    format: Literal["fp8", "fp4"]

    @property
    def shape(self) -> torch.Size:
        """Of the matrix that is meant, [out, in]."""
        rows, columns = self.data.shape
        return torch.Size((rows, columns * 2 if self.format == "fp4" else columns))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The reference values, [out, in]."""
        if self.format == "fp8":
            return _fp8(self.data, scale_values(self.scale)).to(dtype)
        return _fp4(self.data, scale_values(self.scale)).to(dtype)


def scale_values(scale: Tensor) -> Tensor:
    """Stored scales to fp32: e8m0 exponents (as float8_e8m0fnu or raw uint8) or floats."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)


def _fp8(data: Tensor, scale: Tensor) -> Tensor:
    rows, columns = data.shape
    spread = scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return data.to(torch.float32) * spread


def _fp4(data: Tensor, scale: Tensor) -> Tensor:
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=data.device)
    raw = data.view(torch.uint8)
    nibbles = torch.stack([raw & 15, raw >> 4], dim=-1).flatten(1)
    return table[nibbles.long()] * scale.repeat_interleave(FP4_GROUP, 1)


def quantise_fp8(weight: Tensor) -> QuantisedWeight:
    """fp32 [out, in] to FP8 blocks with e8m0 scales: the least power of two that fits each block's maximum."""
    rows, columns = weight.shape
    tall, wide = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    padded = weight.new_zeros(tall * FP8_BLOCK, wide * FP8_BLOCK)
    padded[:rows, :columns] = weight
    blocks = padded.view(tall, FP8_BLOCK, wide, FP8_BLOCK)
    largest = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-30)
    exponent = torch.ceil(torch.log2(largest / 448)).clamp(-127, 127)
    scaled = (blocks / torch.exp2(exponent)[:, None, :, None]).clamp(-448, 448)
    data = scaled.view_as(padded)[:rows, :columns].contiguous().to(torch.float8_e4m3fn)
    return QuantisedWeight(data, (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu), "fp8")


def quantise_fp4(weight: Tensor) -> QuantisedWeight:
    """fp32 [out, in], in a multiple of 32, to MXFP4, nearest value, ties to the smaller magnitude."""
    rows, columns = weight.shape
    if columns % FP4_GROUP:
        raise ValueError(f"MXFP4 needs columns in multiples of {FP4_GROUP}, got {columns}")
    groups = weight.view(rows, columns // FP4_GROUP, FP4_GROUP)
    largest = groups.abs().amax(-1).clamp(min=1e-30)
    exponent = torch.ceil(torch.log2(largest / 6)).clamp(-127, 127)
    scaled = (groups / torch.exp2(exponent).unsqueeze(-1)).reshape(rows, columns)
    table = torch.tensor(E2M1_VALUES, device=weight.device)
    code = torch.bucketize(scaled.abs(), (table[1:] + table[:-1]) / 2)
    code = (code + 8 * (scaled < 0)).to(torch.uint8)
    packed = code[:, 0::2] | (code[:, 1::2] << 4)
    return QuantisedWeight(packed, (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu), "fp4")
