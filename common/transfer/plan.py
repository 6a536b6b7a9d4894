"""Byte runs of a transfer: merging what is contiguous on both sides, bounding what is posted at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """`size` bytes from local address `source` to the receiver's address `target`. `piece_end` is where the piece of
    memory ends that the receiver registered there: one write must not cross it (0 = not known, then the same for all).
    """

    source: int
    target: int
    size: int
    piece_end: int = 0


def merge(runs: Iterable[Run], max_bytes: int) -> list[Run]:
    """Joins runs that follow one another on both sides in one piece, to at most `max_bytes` each; longer ones are cut.

    Every byte of the input is in the output exactly once, in order.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes = {max_bytes} is less than 1")
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.source + last.size == run.source
            and last.target + last.size == run.target
            and last.piece_end == run.piece_end
            and last.size + run.size <= max_bytes
        ):
            merged[-1] = Run(last.source, last.target, last.size + run.size, run.piece_end)
            continue
        done = 0
        while done < run.size:
            size = min(run.size - done, max_bytes)
            merged.append(Run(run.source + done, run.target + done, size, run.piece_end))
            done += size
    return merged


def batches(runs: Iterable[Run], max_runs: int, max_bytes: int) -> Iterator[list[Run]]:
    """Splits runs, in order, into lists of at most `max_runs` runs and `max_bytes` bytes (one run at least)."""
    batch: list[Run] = []
    size = 0
    for run in runs:
        if batch and (len(batch) >= max_runs or size + run.size > max_bytes):
            yield batch
            batch, size = [], 0
        batch.append(run)
        size += run.size
    if batch:
        yield batch


def cut(runs: Iterable[Run], sizes_from: Callable[[int, int], Sequence[int]]) -> list[Run]:
    """Cuts runs at the borders of the sender's own pieces; `sizes_from(address, size)` says how `size` bytes from
    `address` on lie in them."""
    found: list[Run] = []
    for run in runs:
        done = 0
        for size in sizes_from(run.source, run.size):
            found.append(Run(run.source + done, run.target + done, size, run.piece_end))
            done += size
    return found
