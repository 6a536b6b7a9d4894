"""Reads a layer's tensors out of a checkpoint by native name, checks their shapes and places them.

`Dense` is the one way matrices are used: several matrices that share an input become one product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from common.model.quantised_weight import QuantisedWeight

Weight = Tensor | QuantisedWeight
DequantiseMode = Literal["at_load", "per_use"]
ROW_MULTIPLE = 8


def padded_rows(rows: int) -> int:
    """Rows of a dense product: the next multiple of 8.

    MKL's fp32 product gives a row the same bits for every row count that is a multiple of 8, and others
    for 1, 2, 3, 5 or 7: with padding a token's result does not depend on who shares its batch.
    """
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _placed(weight: Weight, device: torch.device) -> Weight:
    if isinstance(weight, Tensor):
        return weight.to(device)
    return replace(weight, data=weight.data.to(device), scale=weight.scale.to(device))


class Dense:
    """x @ W^T with W the given [out_i, in] matrices one below the other: [rows, in] to [rows, sum(out_i)] fp32.

    `at_load` keeps one dense copy in the compute dtype, `per_use` keeps the parts as the checkpoint has them
    and rebuilds the dense matrix for every product (less memory, slower).
    """

    def __init__(
        self, parts: Sequence[Weight], device: torch.device, compute_dtype: torch.dtype, mode: DequantiseMode
    ) -> None:
        self._device = device
        self._dtype = compute_dtype
        self.out_features = sum(part.shape[0] for part in parts)
        self.in_features = parts[0].shape[1]
        self._dense: Tensor | None = None
        self._parts: tuple[Weight, ...] = ()
        if mode == "at_load" or all(isinstance(part, Tensor) for part in parts):
            self._dense = self._build(parts)
        else:
            self._parts = tuple(_placed(part, device) for part in parts)

    def _build(self, parts: Sequence[Weight]) -> Tensor:
        dense = [
            (part if isinstance(part, Tensor) else part.dequantise(self._dtype)).to(self._device, self._dtype)
            for part in parts
        ]
        return dense[0].contiguous() if len(dense) == 1 else torch.cat(dense)

    def matrix(self) -> Tensor:
        """The dense [out, in] matrix in the compute dtype."""
        return self._dense if self._dense is not None else self._build(self._parts)

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] % ROW_MULTIPLE:
            raise ValueError(f"dense product over {x.shape[0]} rows; they must be padded to a multiple of 8")
        if self._dtype is torch.float32:
            return F.linear(x, self.matrix())
        return F.linear(x.to(self._dtype), self.matrix()).float()


class WeightReader:
    """Takes tensors by native name from a checkpoint's mapping.

    Errors: ValueError naming the tensor where it is absent or its shape disagrees with the configuration.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        device: torch.device,
        compute_dtype: torch.dtype,
        mode: DequantiseMode,
    ) -> None:
        if mode not in ("at_load", "per_use"):
            raise ValueError(f"dequantise_weights is {mode!r}; it must be 'at_load' or 'per_use'")
        self._weights = weights
        self._device = device
        self.compute_dtype = compute_dtype
        self._mode: DequantiseMode = mode

    @property
    def keeps_dense(self) -> bool:
        """Whether every matrix is kept dense, whatever the checkpoint has."""
        return self._mode == "at_load" or all(isinstance(weight, Tensor) for weight in self._weights.values())

    def _take(self, name: str, shape: tuple[int, ...]) -> Weight:
        weight = self._weights.get(name)
        if weight is None:
            raise ValueError(f"the checkpoint has no tensor {name!r}")
        if tuple(weight.shape) != shape:
            raise ValueError(f"tensor {name!r} has shape {tuple(weight.shape)}; the configuration needs {shape}")
        return weight

    def vector(self, name: str, *shape: int) -> Tensor:
        """A small tensor (norm, bias, position bias, sink) in fp32 on the device."""
        weight = self._take(name, shape)
        dense = weight if isinstance(weight, Tensor) else weight.dequantise(torch.float32)
        return dense.to(self._device, torch.float32).contiguous()

    def table(self, name: str, *shape: int) -> Tensor:
        """An integer lookup table as int64 on the device."""
        weight = self._take(name, shape)
        if not isinstance(weight, Tensor):
            raise ValueError(f"tensor {name!r} is a lookup table but is stored quantised")
        return weight.to(self._device, torch.int64).contiguous()

    def dense(self, *named: tuple[str, int, int], dtype: torch.dtype | None = None) -> Dense:
        """One product over the matrices (name, out, in), in this order; `dtype` overrides the compute dtype."""
        parts = [self._take(name, (rows, columns)) for name, rows, columns in named]
        return Dense(parts, self._device, dtype or self.compute_dtype, self._mode)
