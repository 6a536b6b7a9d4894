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

from common.model.panels import cut, lone_panel, product
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
        self._out = sum(part.shape[0] for part in parts)
        self._panels: Tensor | None = None
        self._parts: tuple[Weight, ...] = ()
        if mode == "at_load" or all(isinstance(part, Tensor) for part in parts):
            panel = lone_panel(self._out) if device.type == "cpu" else self._out
            self._panels = cut(joined(parts, device, compute_dtype), panel)
        else:
            self._parts = tuple(_placed(part, device) for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in], rows a multiple of 8."""
        if x.shape[0] % ROW_MULTIPLE:
            raise ValueError(f"dense product over {x.shape[0]} rows; they must be padded to a multiple of 8")
        if x.dtype is not self._dtype:
            x = x.to(self._dtype)
        if self._panels is not None:
            found = product(x, self._panels)
            if found.shape[1] != self._out:
                found = found[:, : self._out]
            return found if found.dtype is torch.float32 else found.float()
        return F.linear(x, joined(self._parts, self._device, self._dtype)).float()


def joined(parts: Sequence[Weight], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The matrices' values, one below the other: [sum(out_i), in]."""
    dense = [(part if isinstance(part, Tensor) else part.dequantise(dtype)).to(device, dtype) for part in parts]
    return dense[0] if len(dense) == 1 else torch.cat(dense)


class GroupedOutput:
    """Heads in G groups, each through its own matrix [rank, width]: [rows, H, D] to [rows, G rank] fp32."""

    def __init__(self, reader: WeightReader, name: str, groups: int, rank: int, width: int) -> None:
        self._groups, self._rank, self._width = groups, rank, width
        self._reader = reader
        self._name = name
        self._kept = self._matrices() if reader.keeps_dense else None

    def _matrices(self) -> Tensor:
        """[G, width, rank]"""
        matrix = self._reader.matrix(self._name, self._groups * self._rank, self._width)
        return matrix.view(self._groups, self._rank, self._width).transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        matrices = self._matrices() if self._kept is None else self._kept
        grouped = x.view(rows, self._groups, self._width).transpose(0, 1)
        found = torch.bmm(grouped.to(matrices.dtype), matrices)
        return found.transpose(0, 1).reshape(rows, -1).float()


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
        self.device = device
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
        return dense.to(self.device, torch.float32).contiguous()

    def table(self, name: str, *shape: int) -> Tensor:
        """An integer lookup table as int64 on the device."""
        weight = self._take(name, shape)
        if not isinstance(weight, Tensor):
            raise ValueError(f"tensor {name!r} is a lookup table but is stored quantised")
        return weight.to(self.device, torch.int64).contiguous()

    def dense(self, *named: tuple[str, int, int], dtype: torch.dtype | None = None) -> Dense:
        """One product over the matrices (name, out, in), in this order; `dtype` overrides the compute dtype."""
        parts = [self._take(name, (rows, columns)) for name, rows, columns in named]
        return Dense(parts, self.device, dtype or self.compute_dtype, self._mode)

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """One matrix [rows, columns] in the compute dtype on the device, whatever the mode."""
        return joined([self._take(name, (rows, columns))], self.device, self.compute_dtype)
