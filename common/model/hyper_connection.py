"""Manifold-constrained hyper-connections: n residual streams, mixed by a doubly stochastic matrix.

For streams X [T, n, d] each sub-block reads u = sum_j pre_j X_j and writes X'_k = post_k y + sum_j M[j, k] X_j.
pre, post and M come from rms(flatten(X)) through one small matrix; M is made doubly stochastic by Sinkhorn's
alternating normalisation (each with its epsilon, a column step first and last).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.model.activations import sigmoid
from common.model.config import ModelConfig
from common.model.norms import inverse_rms
from common.model.weights import WeightReader


def sinkhorn(matrices: Tensor, iterations: int, eps: float) -> Tensor:
    """Normalises columns, then (iterations - 1) times rows and columns; in place.

    `matrices` is [n, n, T] fp32, positive: the tokens lie innermost, so that each step is three operations on
    contiguous memory however many tokens there are.
    """
    matrices.div_(matrices.sum(0).add_(eps))
    for _ in range(iterations - 1):
        matrices.div_(matrices.sum(1, keepdim=True).add_(eps))
        matrices.div_(matrices.sum(0).add_(eps))
    return matrices


@dataclass(frozen=True)
class Mixing:
    """What one sub-block does to the streams: `post` [T, n, 1] and `residual` [T, n, n], row k = M[:, k]."""

    post: Tensor
    residual: Tensor


class HyperConnection:
    """The connection around one sub-block; `prefix` is e.g. "layers.3.hc_attn"."""

    def __init__(self, reader: WeightReader, prefix: str, config: ModelConfig) -> None:
        n, d = config.hc_mult, config.hidden_size
        self._n = n
        self._norm_eps = config.rms_norm_eps
        self._eps = config.hc_eps
        self._iterations = config.hc_sinkhorn_iters
        self._fn = reader.dense((f"{prefix}_fn", (2 + n) * n, n * d), dtype=torch.float32)
        self._base = reader.vector(f"{prefix}_base", (2 + n) * n)
        scale = reader.vector(f"{prefix}_scale", 3)
        self._scale = scale.repeat_interleave(torch.tensor([n, n, n * n], device=scale.device))

    def read(self, streams: Tensor) -> tuple[Tensor, Mixing]:
        """[T, n, d] (T a multiple of 8) to the sub-block's input [T, d] and the mixing for `write`."""
        tokens, n, _ = streams.shape
        flat = streams.view(tokens, -1)
        projected = self._fn(flat).mul_(inverse_rms(flat, self._norm_eps))
        mixed = torch.addcmul(self._base, projected, self._scale)
        gates = sigmoid(mixed[:, : 2 * n])
        pre = gates[:, :n].add_(self._eps)
        post = gates[:, n:].mul_(2.0)
        logits = mixed[:, 2 * n :].view(tokens, n, n).permute(1, 2, 0).contiguous()
        # torch.softmax over a middle axis treats the last few tokens of a buffer with another exp.
        logits.sub_(logits.amax(1, keepdim=True)).exp_()
        matrices = logits.div_(logits.sum(1, keepdim=True)).add_(self._eps)
        residual = sinkhorn(matrices, self._iterations, self._eps).permute(2, 1, 0).contiguous()
        return torch.bmm(pre.unsqueeze(1), streams).squeeze(1), Mixing(post.unsqueeze(-1), residual)

    @staticmethod
    def write(streams: Tensor, output: Tensor, mixing: Mixing) -> Tensor:
        """The streams after the sub-block's output [T, d]; a new [T, n, d] tensor."""
        return torch.bmm(mixing.residual, streams).addcmul_(mixing.post, output.unsqueeze(1))


class HyperHead:
    """Joins the streams before the final norm: sum_j a_j X_j with a = sigmoid(scale z + base) + eps."""

    def __init__(self, reader: WeightReader, config: ModelConfig) -> None:
        n, d = config.hc_mult, config.hidden_size
        self._norm_eps = config.rms_norm_eps
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
