"""The bit-exact contract between values and bytes.

Row: rounded to bf16; per 64 of the 448 values without rotation s = max(1e-4, amax) / 448 in fp32, the scale
byte is s's exponent, plus 1 if its mantissa is not zero (a power of two, rounded up), the value
e4m3(clamp(x * 2^(127 - byte), +-448)), nearest even; the 64 rotated values stay bf16.
Index key: Hadamard rotation / sqrt(128), then s = max(1e-4, amax) / 448 in fp32 for all 128, e4m3(x / s).
NaN and infinity are refused: they would poison every later answer silently.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from common.kv.layout import INDEX_VALUES, NOPE_VALUES, ROW_VALUES, SCALE_BLOCK, SCALE_BYTES

FP8_MAX = 448.0
LEAST_AMAX = 1e-4
_BLOCKS = NOPE_VALUES // SCALE_BLOCK


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[n, 512] floats to data [n, 576] uint8 and scales [n, 8] uint8 (the eighth byte is 0).

    Raises ValueError for another width and for values that aren't finite.
    """
    rounded = rows.to(torch.bfloat16)
    # Rounded first: the largest fp32 values are infinite in bf16.
    _check(rounded, ROW_VALUES, "row")
    blocks = rounded[:, :NOPE_VALUES].float().view(-1, _BLOCKS, SCALE_BLOCK)
    exponent = scale_exponents(blocks.abs().amax(-1))
    # 2^(127 - byte): the exponent field of the reciprocal is 254 - byte.
    inverse = ((254 - exponent) << 23).view(torch.float32)
    values = (blocks * inverse.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    count = rows.shape[0]
    data = torch.cat(
        [
            values.view(torch.uint8).view(count, NOPE_VALUES),
            rounded[:, NOPE_VALUES:].contiguous().view(torch.uint8),
        ],
        dim=1,
    )
    scales = torch.zeros(count, SCALE_BYTES, dtype=torch.uint8, device=rows.device)
    scales[:, :_BLOCKS] = exponent.to(torch.uint8)
    return data, scales


def scale_exponents(largest: Tensor) -> Tensor:
    """Largest magnitudes, fp32, to biased exponents of their scales, int32."""
    bits = (largest.clamp(min=LEAST_AMAX) / FP8_MAX).view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def dequantise_rows(data: Tensor, scales: Tensor) -> Tensor:
    """data [n, 576] and scales [n, 8] uint8 to [n, 512] fp32."""
    count = data.shape[0]
    out = torch.empty(count, ROW_VALUES, dtype=torch.float32, device=data.device)
    exponent = scales[:, :_BLOCKS].to(torch.int32)
    values = _e4m3_times_2_to_minus_120(data[:, :NOPE_VALUES]).view(count, _BLOCKS, SCALE_BLOCK)
    target = out[:, :NOPE_VALUES].unflatten(1, (_BLOCKS, SCALE_BLOCK))
    if count and int(exponent.max()) + 120 > 254:
        torch.mul(values, 2.0**120, out=target)
        target *= (exponent << 23).view(torch.float32).unsqueeze(-1)
    else:
        torch.mul(values, ((exponent + 120) << 23).view(torch.float32).unsqueeze(-1), out=target)
    out[:, NOPE_VALUES:] = data[:, NOPE_VALUES:].contiguous().view(torch.bfloat16)
    return out


def _e4m3_times_2_to_minus_120(data: Tensor) -> Tensor:
    """e4m3 bytes to bf16 by moving bits: six times as fast as torch's cast on the CPU, exact for all finite
    bytes; the exponent biases differ by 120."""
    wide = data.view(torch.int8).to(torch.int16)
    return wide.bitwise_left_shift_(4).bitwise_and_(-0x7810).view(torch.bfloat16)


def quantise_index_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """[n, 128] floats, not yet rotated, to data [n, 128] uint8 and scales [n] fp32. Raises ValueError."""
    _check(keys, INDEX_VALUES, "index key")
    rotated = hadamard_rotate(keys.float())
    scale = rotated.abs().amax(-1).clamp_(min=LEAST_AMAX) / FP8_MAX
    values = (rotated / scale.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.view(torch.uint8), scale


def dequantise_index_keys(data: Tensor, scales: Tensor) -> Tensor:
    """data [n, 128] uint8 and scales [n] fp32 to [n, 128] fp32 in the rotated basis."""
    values = _e4m3_times_2_to_minus_120(data).to(torch.float32).mul_(2.0**120)
    return values.mul_(scales.unsqueeze(-1))


def hadamard_rotate(x: Tensor) -> Tensor:
    """Multiplies [..., 128] fp32 by the Sylvester-Hadamard matrix / sqrt(128).

    As seven rounds of sums and differences, so that every backend can do the same roundings.
    """
    width = x.shape[-1]
    half = 1
    while half < width:
        pairs = x.reshape(*x.shape[:-1], width // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([low + high, low - high], dim=-2).reshape(x.shape)
        half *= 2
    return x * width**-0.5


def rotate_queries(queries: Tensor) -> Tensor:
    """[..., 128] fp32 in the basis that index keys are kept in. One product: queries are many and, unlike keys,
    are not kept. Rows are padded to a multiple of 8, so that a query's bits do not depend on their number."""
    flat = queries.reshape(-1, queries.shape[-1])
    rows = flat.shape[0]
    padded = torch.nn.functional.pad(flat, (0, 0, 0, -rows % 8))
    return (padded @ _hadamard_matrix(queries.device))[:rows].view(queries.shape)


@functools.cache
def _hadamard_matrix(device: torch.device) -> Tensor:
    """[128, 128] fp32, symmetric and orthonormal."""
    return hadamard_rotate(torch.eye(INDEX_VALUES, device=device))


def _check(values: Tensor, width: int, what: str) -> None:
    if values.dim() != 2 or values.shape[1] != width:
        raise ValueError(f"{what}s must be [n, {width}], got {list(values.shape)}")
    finite = torch.isfinite(values).all(dim=1)
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise ValueError(f"{what} {bad} of {values.shape[0]} holds NaN or infinity")
