"""Sigmoid, SiLU and sqrt(softplus) built from exp and log1p.

torch's fused kernels use one code path for full vectors and another for the tail of a buffer, and the two
differ in the last bit: a row's value would depend on how many other rows are in the batch. exp, log1p and
the arithmetic operators give the same bits at every position of a buffer of any length (held by
tests/model/test_batch_invariance.py).
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), any shape, fp32; saturates to 0 and 1 without NaN."""
    return x.neg().exp_().add_(1.0).reciprocal_()


def silu_(gate: Tensor) -> Tensor:
    """gate * sigmoid(gate), written into `gate`."""
    return gate.div_(gate.neg().exp_().add_(1.0))


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x))) > 0 for every x > -206 in fp32.

    softplus alone underflows to zero below -103, where its root is still representable: with every expert's
    score zero the router's weights would be 0/0. There softplus(x) = exp(x), hence its root is exp(x/2).
    """
    magnitude = x.abs()
    soft = torch.log1p(magnitude.neg().exp_()).add_(x.clamp(min=0.0)).sqrt_()
    return torch.where(x < -40.0, torch.exp(x * 0.5), soft)
