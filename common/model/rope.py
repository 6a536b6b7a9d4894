"""Rotary positions on the last channels of a vector, as interleaved pairs (2i, 2i+1).

Pair i at position t turns by t * w_i. Layers without compression use w_i = theta^(-2i/R); compressed layers
use YaRN-interpolated frequencies over another base, without its magnitude factor. Angles are fp32 products,
as the model was trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.model.config import ModelConfig


def plain_frequencies(theta: float, rope_dim: int) -> Tensor:
    """theta^(-2i/R), [R/2] fp32."""
    return 1.0 / (theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))


def yarn_frequencies(
    theta: float, rope_dim: int, factor: float, beta_fast: float, beta_slow: float, original_positions: int
) -> Tensor:
    """YaRN: fast pairs keep their frequency, slow ones are divided by `factor`, a linear ramp between; [R/2] fp32."""

    def correction(rotations: float) -> float:
        return rope_dim * math.log(original_positions / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    width = max(high - low, 1e-3)
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    frequencies = plain_frequencies(theta, rope_dim)
    return frequencies * (1.0 - ramp) + frequencies / factor * ramp


@dataclass(frozen=True)
class Rotation:
    """Unit complex numbers of n positions: `forward` and its conjugate `backward`, [n, R/2] complex64."""

    forward: Tensor
    backward: Tensor

    def rows(self, start: int, stop: int) -> Rotation:
        return Rotation(self.forward[start:stop], self.backward[start:stop])


class Rotary:
    """The two frequency sets of a model on its device."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.device = device
        self._plain = plain_frequencies(config.rope_theta, config.rope_dim).to(device)
        self._compressed = yarn_frequencies(
            config.compress_rope_theta,
            config.rope_dim,
            config.rope_factor,
            config.rope_beta_fast,
            config.rope_beta_slow,
            config.rope_original_positions,
        ).to(device)

    def at(self, positions: Tensor, ratio: int) -> Rotation:
        """Rotations of int64 positions [n] for layers of `ratio` (0: the plain set)."""
        frequencies = self._compressed if ratio else self._plain
        angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
        cosine, sine = angles.cos(), angles.sin()
        return Rotation(torch.complex(cosine, sine), torch.complex(cosine, -sine))


def rotate_(x: Tensor, turn: Tensor) -> Tensor:
    """Turns the last R channels of x [n, ..., D] fp32 in place by turn [n, R/2] complex64; returns x."""
    rope_dim = 2 * turn.shape[-1]
    pairs = torch.view_as_complex(x[..., -rope_dim:].unflatten(-1, (-1, 2)))
    pairs.mul_(turn.view(turn.shape[0], *([1] * (x.dim() - 2)), turn.shape[-1]))
    return x
