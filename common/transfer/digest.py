"""Digests of landed bytes: xxh3-128 over memory that is not copied where it is the host's."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from common.transfer.landed_memory import LandedMemory

_HOST = LandedMemory()


def digest_of(pieces: Iterable[tuple[int, int]], memory: LandedMemory = _HOST) -> bytes:
    """16 bytes: xxh3-128 over the bytes at (address, length) pieces, in order. The caller owns the memory."""
    state = xxhash.xxh3_128()
    for view in memory.read(list(pieces)):
        state.update(view)
    return state.digest()
