"""Manifold-constrained hyper-connections: n residual streams, mixed by a doubly stochastic matrix.

For streams X [T, n, d] each sub-block reads u = sum_j pre_j X_j and writes X'_k = post_k y + sum_j M[j, k] X_j.
pre, post and M come from rms(flatten(X)) through one small matrix; M is made doubly stochastic by Sinkhorn's
alternating normalisation (each with its epsilon, a column step first and last).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.model.activations import sigmoid
from common.model.config import ModelConfig
from common.model.norms import inverse_rms
from common.model.weights import Dense, WeightReader


def sinkhorn(matrices: Tensor, iterations: int, eps: Tensor) -> Tensor:
    """Normalises columns, then (iterations - 1) times rows and columns, for many tokens.

    `matrices` [T, n, n] fp32, positive; eps a tensor of one value (a Python number is converted anew at every
    use); returns the transposed results, contiguous [T, n, n]. The tokens lie innermost meanwhile, so that each
    step is three operations on contiguous memory.
    """
    work = matrices.permute(1, 2, 0).contiguous()
    columns = torch.empty_like(work[0])
    rows = torch.empty_like(work[:, :1])
    work.div_(torch.sum(work, 0, out=columns).add_(eps))
    for _ in range(iterations - 1):
        work.div_(torch.sum(work, 1, keepdim=True, out=rows).add_(eps))
        work.div_(torch.sum(work, 0, out=columns).add_(eps))
    return work.permute(2, 1, 0).contiguous()


def sinkhorn_factors(matrices: Tensor, iterations: int, eps: float) -> Tensor:
    """As `sinkhorn`, for few tokens: two small operations a step.

    The iterate is always diag(r) M diag(c). A column step c <- c / (c M^T r + eps) is, with d = 1 / c,
    d <- M^T r + eps d: one batched product; rows likewise.
    """
    transposed = matrices.transpose(1, 2).contiguous()
    row_divisors = matrices.new_ones(matrices.shape[0], matrices.shape[1], 1)
    column_divisors = torch.ones_like(row_divisors)
    rows = torch.ones_like(row_divisors)
    columns = torch.empty_like(row_divisors)
    torch.reciprocal(column_divisors.baddbmm_(transposed, rows, beta=eps), out=columns)
    for _ in range(iterations - 1):
        torch.reciprocal(row_divisors.baddbmm_(matrices, columns, beta=eps), out=rows)
        torch.reciprocal(column_divisors.baddbmm_(transposed, rows, beta=eps), out=columns)
    return transposed.mul_(columns).mul_(rows.transpose(1, 2))


@dataclass(frozen=True)
class Mixing:
    """What one sub-block does to the streams: `post` [T, n, 1] and `residual` [T, n, n], row k = M[:, k]."""

    post: Tensor
    residual: Tensor


class HyperConnection:
    """The connection around one sub-block; `prefix` is e.g. "layers.3.hc_attn".

    The scales are folded into the matrix at load, and the signs and the factor of the two sigmoids into matrix and
    base: pre = 1 / (1 + exp(-z)) + eps and post = 2 sigmoid(z) = 1 / (1/2 + exp(-z - ln 2)).
    """

    def __init__(self, reader: WeightReader, prefix: str, config: ModelConfig) -> None:
        n, d = config.hc_mult, config.hidden_size
        self._n = n
        self._eps = config.hc_eps
        self._iterations = config.hc_sinkhorn_iters
        device = reader.device
        self._norm_eps = torch.tensor([config.rms_norm_eps], device=device)
        self._eps_tensor = torch.tensor([config.hc_eps], device=device)
        self._inside = torch.tensor([1.0] * n + [0.5] * n, device=device)
        self._outside = torch.tensor([config.hc_eps] * n + [0.0] * n, device=device)
        matrix = reader.vector(f"{prefix}_fn", (2 + n) * n, n * d)
        base = reader.vector(f"{prefix}_base", (2 + n) * n)
        scale = reader.vector(f"{prefix}_scale", 3)
        signed = torch.cat((-scale[0].expand(n), -scale[1].expand(n), scale[2].expand(n * n)))
        self._fn = Dense([matrix * signed.unsqueeze(1)], device, torch.float32, "at_load")
        self._base = torch.cat((-base[:n], -base[n : 2 * n] - math.log(2.0), base[2 * n :]))

    def read(self, streams: Tensor, *, decoding: bool) -> tuple[Tensor, Mixing]:
        """[T, n, d] (T a multiple of 8) to the sub-block's input [T, d] and the mixing for `write`.

        The two forms of Sinkhorn round differently; which is taken depends on `decoding` alone.
        """
        tokens, n = streams.shape[0], self._n
        flat = streams.view(tokens, -1)
        mixed = torch.addcmul(self._base, self._fn(flat), inverse_rms(flat, self._norm_eps))
        gates, logits = mixed.split((2 * n, n * n), 1)
        gates = gates.exp().add_(self._inside).reciprocal_().add_(self._outside)
        # Not torch.softmax: over a short axis it is slow, over a middle one its bits depend on the buffer.
        logits = logits.view(tokens, n, n)
        logits = logits.sub(logits.amax(2, keepdim=True)).exp_()
        matrices = logits.div_(logits.sum(2, keepdim=True)).add_(self._eps_tensor)
        if decoding:
            residual = sinkhorn_factors(matrices, self._iterations, self._eps)
        else:
            residual = sinkhorn(matrices, self._iterations, self._eps_tensor)
        gates = gates.unsqueeze(1)
        read = torch.bmm(gates[..., :n], streams).squeeze(1)
        return read, Mixing(gates[..., n:].transpose(1, 2), residual)

    @staticmethod
    def write(streams: Tensor, output: Tensor, mixing: Mixing) -> Tensor:
        """The streams after the sub-block's output [T, d]; a new [T, n, d] tensor."""
        return torch.bmm(mixing.residual, streams).addcmul_(mixing.post, output.unsqueeze(1))


class HyperHead:
    """Joins the streams before the final norm: sum_j a_j X_j with a = sigmoid(scale z + base) + eps."""

    def __init__(self, reader: WeightReader, config: ModelConfig) -> None:
        n, d = config.hc_mult, config.hidden_size
        self._norm_eps = torch.tensor([config.rms_norm_eps], device=reader.device)
        self._eps = config.hc_eps
        self._fn = reader.dense(("hc_head_fn", n, n * d), dtype=torch.float32)
        self._base = reader.vector("hc_head_base", n)
        self._scale = reader.vector("hc_head_scale", 1)

    def __call__(self, streams: Tensor) -> Tensor:
        """[T, n, d] (T a multiple of 8) to [T, d]."""
        flat = streams.view(streams.shape[0], -1)
        projected = self._fn(flat).mul_(inverse_rms(flat, self._norm_eps))
        weights = sigmoid(torch.addcmul(self._base, projected, self._scale)).add_(self._eps)
        return torch.bmm(weights.unsqueeze(1), streams).squeeze(1)
