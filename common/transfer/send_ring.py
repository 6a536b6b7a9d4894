"""Registered memory from which pages are sent: spans are taken in a row and may come back in any order."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGN_BYTES = 64


@dataclass
class Span:
    """`size` bytes at `offset` of the ring; `data` is them as uint8."""

    offset: int
    size: int
    data: Tensor
    released: bool = False

    @property
    def address(self) -> int:
        return self.data.data_ptr()


class SendRing:
    """A byte ring. Thread-safe. Raises ValueError for spans that could never fit."""

    def __init__(self, size: int, page_locked: bool = False) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=page_locked)
        self.size = size
        self._spans: deque[Span] = deque()
        self._freed = threading.Condition()
        self.high_water = 0

    def take(self, size: int, timeout_s: float = 0.0) -> Span | None:
        """`size` bytes in one piece, zeroed, or None when none came free within `timeout_s`."""
        needed = -(-max(size, 1) // ALIGN_BYTES) * ALIGN_BYTES
        if needed > self.size:
            raise ValueError(f"a span of {size} bytes does not fit a send ring of {self.size}")
        end = time.monotonic() + timeout_s
        with self._freed:
            offset = self._place(needed)
            while offset is None:
                left = end - time.monotonic()
                if left <= 0:
                    return None
                self._freed.wait(left)
                offset = self._place(needed)
            span = Span(offset, needed, self.memory[offset : offset + size])
            self._spans.append(span)
            self.high_water = max(self.high_water, self._used())
        span.data.zero_()
        return span

    def release(self, span: Span) -> None:
        """Gives a span back. Raises ValueError the second time."""
        with self._freed:
            if span.released:
                raise ValueError(f"span at {span.offset} was released twice")
            span.released = True
            while self._spans and self._spans[0].released:
                self._spans.popleft()
            self._freed.notify_all()

    @property
    def used(self) -> int:
        """Bytes not free, released ones behind an older live span included."""
        with self._freed:
            return self._used()

    def _used(self) -> int:
        if not self._spans:
            return 0
        first, last = self._spans[0], self._spans[-1]
        end = last.offset + last.size
        return end - first.offset if end > first.offset else self.size - first.offset + end

    def _place(self, size: int) -> int | None:
        """Offset for a new span: behind the newest one, or at the start when that does not fit."""
        if not self._spans:
            return 0
        tail = self._spans[0].offset
        head = self._spans[-1].offset + self._spans[-1].size
        if self._spans[-1].offset >= tail:
            if head + size <= self.size:
                return head
            return 0 if size <= tail else None
        return head if head + size <= tail else None
