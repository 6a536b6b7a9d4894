"""Values as they will be after their packed form, with gradients passed straight through."""

from __future__ import annotations

import torch
from torch import Tensor

from common.kv.layout import NOPE_VALUES, SCALE_BLOCK
from common.kv.quantise import FP8_MAX, LEAST_AMAX


def _through(x: Tensor, quantised: Tensor) -> Tensor:
    return x + (quantised - x).detach()


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def fake_rows(rows: Tensor) -> Tensor:
    """[..., 512]: the first 448 channels as fp8 in blocks of 64 with power-of-two scales, all rounded to bf16."""
    x = rows.detach().to(torch.bfloat16).float()
    blocks = x[..., :NOPE_VALUES].unflatten(-1, (-1, SCALE_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=LEAST_AMAX)
    scale = torch.exp2(torch.ceil(torch.log2(largest / FP8_MAX)))
    blocks = _e4m3(blocks / scale) * scale
    return _through(rows, torch.cat([blocks.flatten(-2), x[..., NOPE_VALUES:]], -1).to(rows.dtype))


def fake_index_keys(keys: Tensor) -> Tensor:
    """[..., 128]: fp8 with one fp32 scale. The rotation that serving adds only makes its error smaller."""
    x = keys.detach().float()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=LEAST_AMAX) / FP8_MAX
    return _through(keys, (_e4m3(x / scale) * scale).to(keys.dtype))


def fake_fp8_blocks(weight: Tensor) -> Tensor:
    """[out, in] as FP8 in 128 x 128 blocks with power-of-two scales; both sizes multiples of 128 or smaller."""
    x = weight.detach()
    rows, columns = x.shape
    tall, wide = min(rows, 128), min(columns, 128)
    blocks = x.unflatten(0, (-1, tall)).unflatten(2, (-1, wide))
    largest = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(largest / FP8_MAX)).clamp(-127, 127))
    return _through(weight, (_e4m3(blocks / scale) * scale).view(rows, columns))
