"""Facts about one forward pass that all layers share, computed once: positions, rotations, closing windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.model.indexer import first_entries
from common.model.kv_store import DecodeKV, FixedDecodeKV, PrefillKV
from common.model.rope import Rotary, Rotation


@dataclass(frozen=True)
class Segment:
    """One sequence's chunk inside a packed prefill: rows start ... stop - 1 of the pack."""

    kv: PrefillKV
    start: int
    stop: int
    length: int
    """Tokens already in the store: the chunk's first position."""
    entry_turns: dict[int, Tensor]
    """For each ratio, the rotations of the entries that this chunk completes."""

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PrefillStep:
    """Several chunks packed into `rows` rows, of which those behind the last segment are padding."""

    rows: int
    rotations: dict[int, Rotation]
    """Rotation of every packed row by layer ratio."""
    phases: dict[int, Tensor]
    """Position modulo ratio of every packed row."""
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Closing:
    """The batch rows whose token completes an entry, and the rotations of those entries."""

    rows: Tensor
    turn: Tensor


@dataclass(frozen=True)
class DecodeStep:
    """One token each of B sequences, padded to `rows`; positions also as plain integers."""

    kv: DecodeKV
    batch: int
    rows: int
    positions: tuple[int, ...]
    rotations: dict[int, Rotation]
    phases: dict[int, Tensor]
    closing: dict[int, Closing]
    entry_counts: dict[int, Tensor]
    """Entries of each sequence after this token, [B] int64 by ratio."""
    everything: Tensor | None
    """[B, topk]: what sequences with at most topk C4 entries read; None without C4 layers."""
    crowded: bool
    """Whether some sequence has more C4 entries than topk."""
    window_bias: Tensor | None
    """[B, 1, window] with -inf at slots before position 0; None where no sequence has any."""


@dataclass(frozen=True)
class FixedStep:
    """One token each of B sequences, B a multiple of 8, in fixed shapes. `entry_turns` by ratio: the rotation of the
    entry that the token's window begins, [B, R/2], right where the token closes it."""

    kv: FixedDecodeKV
    rotations: dict[int, Rotation]
    phases: dict[int, Tensor]
    entry_turns: dict[int, Tensor]


def fixed_step(rotary: Rotary, kv: FixedDecodeKV, ratios: Sequence[int]) -> FixedStep:
    positions = kv.positions
    compressed = [ratio for ratio in ratios if ratio]
    return FixedStep(
        kv=kv,
        rotations=_rotations(rotary, positions, ratios),
        phases={ratio: positions % ratio for ratio in compressed},
        entry_turns={ratio: rotary.at(positions // ratio * ratio, ratio).forward for ratio in compressed},
    )


def _rotations(rotary: Rotary, positions: Tensor, ratios: Sequence[int]) -> dict[int, Rotation]:
    """The two compressed ratios share one set of frequencies, hence one object."""
    found: dict[int, Rotation] = {}
    if 0 in ratios:
        found[0] = rotary.at(positions, 0)
    compressed = [ratio for ratio in ratios if ratio]
    if compressed:
        found.update(dict.fromkeys(compressed, rotary.at(positions, compressed[0])))
    return found


def prefill_step(
    rotary: Rotary, kvs: Sequence[PrefillKV], counts: Sequence[int], rows: int, ratios: Sequence[int]
) -> PrefillStep:
    """`counts[i]` tokens of sequence i, packed in order into `rows` rows; `ratios` are the model's distinct ones."""
    device = rotary.device
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    segments: list[Segment] = []
    start = 0
    for kv, count in zip(kvs, counts, strict=True):
        length = kv.length
        torch.arange(length, length + count, out=positions[start : start + count])
        turns: dict[int, Tensor] = {}
        for ratio in ratios:
            if ratio:
                entries = torch.arange(length // ratio, (length + count) // ratio, device=device)
                turns[ratio] = rotary.at(entries * ratio, ratio).forward
        segments.append(Segment(kv, start, start + count, length, turns))
        start += count
    phases = {ratio: positions % ratio for ratio in ratios if ratio}
    return PrefillStep(rows, _rotations(rotary, positions, ratios), phases, tuple(segments))


def decode_step(rotary: Rotary, kv: DecodeKV, rows: int, ratios: Sequence[int], window: int, topk: int) -> DecodeStep:
    """Padding rows stand at position 0; they are computed by dense products and never reach the store."""
    device = rotary.device
    batch = kv.positions.shape[0]
    positions = tuple(int(position) for position in kv.positions.tolist())
    padded = torch.zeros(rows, dtype=torch.int64, device=device)
    padded[:batch] = kv.positions
    closing: dict[int, Closing] = {}
    for ratio in ratios:
        if ratio:
            closed = [b for b, position in enumerate(positions) if (position + 1) % ratio == 0]
            first = torch.tensor([positions[b] + 1 - ratio for b in closed], dtype=torch.int64, device=device)
            turn = rotary.at(first, ratio).forward
            closing[ratio] = Closing(torch.tensor(closed, dtype=torch.int64, device=device), turn)
    bias: Tensor | None = None
    if min(positions) < window - 1:
        slots = torch.arange(window, device=device)
        missing = (window - 1 - padded[:batch]).unsqueeze(1)
        bias = torch.zeros(batch, 1, window, device=device)
        bias.masked_fill_((slots < missing).unsqueeze(1), -torch.inf)
    counts = {ratio: (padded[:batch] + 1) // ratio for ratio in ratios if ratio}
    return DecodeStep(
        kv=kv,
        batch=batch,
        rows=rows,
        positions=positions,
        rotations=_rotations(rotary, padded, ratios),
        phases={ratio: padded % ratio for ratio in ratios if ratio},
        closing=closing,
        entry_counts=counts,
        everything=first_entries(counts[4], topk) if 4 in counts else None,
        crowded=(max(positions) + 1) // 4 > topk,
        window_bias=bias,
    )
