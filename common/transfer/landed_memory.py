"""Reads registered memory by address, for digests: the host's as it lies, a device's through a copy."""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor


class LandedMemory:
    """Knows the buffers that lie on a device; every other address is taken for the host's. Thread-safe."""

    def __init__(self, buffers: Iterable[Tensor] = ()) -> None:
        on_device = sorted((b for b in buffers if b.is_cuda), key=lambda b: b.data_ptr())
        self._bytes = [buffer.view(-1).view(torch.uint8) for buffer in on_device]
        self._starts = [buffer.data_ptr() for buffer in self._bytes]
        self._stream = torch.cuda.Stream(self._bytes[0].device) if self._bytes else None
        self._lock = threading.Lock()

    def settle(self) -> None:
        """Waits for everything launched on the device so far, so that a writer from outside can't overtake it."""
        if self._stream is not None:
            torch.cuda.default_stream(self._stream.device).synchronize()

    def read(self, pieces: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of (address, length) pieces. Device memory is copied on a stream of its own, behind nothing that
        computes: a writer from outside has ended before its bytes are asked for. The caller owns the memory."""
        found: list[memoryview | None] = []
        copies: list[tuple[int, Tensor]] = []
        with self._lock, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for place, (address, length) in enumerate(pieces):
                at = bisect.bisect_right(self._starts, address) - 1
                if at >= 0 and address + length <= self._starts[at] + self._bytes[at].nbytes:
                    offset = address - self._starts[at]
                    copies.append((place, self._bytes[at][offset : offset + length].to("cpu", non_blocking=True)))
                    found.append(None)
                else:
                    found.append(memoryview((ctypes.c_char * length).from_address(address)).cast("B"))
            if self._stream is not None:
                self._stream.synchronize()
        for place, copy in copies:
            found[place] = memoryview(copy.numpy().tobytes())
        return [view for view in found if view is not None]
