"""Root-mean-square norms over the last axis, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_rms(x: Tensor, eps: Tensor) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis: [..., D] fp32 to [..., 1].

    eps is a tensor of one value: a Python number is converted anew at every use.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


class RmsNorm:
    """weight * x / rms(x) for x [..., D] and weight [D], fp32; a new tensor."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = torch.tensor([eps], device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return (x * inverse_rms(x, self._eps)).mul_(self._weight)
