"""Digests of landed bytes: xxh3-128 over memory that is not copied."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import xxhash


def digest_of(pieces: Iterable[tuple[int, int]]) -> bytes:
    """16 bytes: xxh3-128 over the bytes at (address, length) pieces, in order. The caller owns the memory."""
    state = xxhash.xxh3_128()
    for address, length in pieces:
        state.update(memoryview((ctypes.c_char * length).from_address(address)).cast("B"))
    return state.digest()
