"""Root-mean-square norms over the last axis, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis: [..., D] fp32 to [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) for x [..., D] and weight [D], fp32; a new tensor."""
    return (x * inverse_rms(x, eps)).mul_(weight)
