"""The CUDA sources: which files, which kernels in them, how they are compiled."""

from __future__ import annotations

import functools
from pathlib import Path

FOLDER = Path(__file__).parent / "cuda"

# File to its kernels.
KERNELS: dict[str, tuple[str, ...]] = {
    "pack": ("pack_rows", "pack_index_keys"),
    "unpack": ("unpack_rows", "unpack_index_pages"),
    "transfer": ("transfer_rows", "transfer_index_keys"),
    "swap_in": ("swap_in_fused", "swap_in_resolve", "swap_in_copy"),
}

# Products and sums are never fused: the bytes must equal the cpu definition's. CuPy adds --ftz=true behind these, so
# no kernel may depend on a subnormal number.
OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--ftz=true")


@functools.cache
def read_source(name: str) -> str:
    """The text of <name>.cu with rows.cuh in the place of its #include, so that a compiler's cache, which is keyed
    by the text, sees every change. Raises ValueError for an unknown name."""
    if name not in KERNELS:
        raise ValueError(f"no CUDA source {name!r}, there are {sorted(KERNELS)}")
    text = (FOLDER / f"{name}.cu").read_text()
    return text.replace('#include "rows.cuh"\n', (FOLDER / "rows.cuh").read_text())
