"""Batches: recall sequences made on the fly and windows of text. Token = byte + 4; 0 = bos, 1 = eos."""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.evaluation.recall import RECORD_CHARACTERS, WINDOW_CHARACTERS

OFFSET = 4
EOS = 1
QUERIES = 24
NEWLINE, EQUALS, QUESTION = (ord(c) + OFFSET for c in "\n=?")


@dataclass(frozen=True)
class Batch:
    """tokens [B, T + 1] int64; weight [B, T]: how much the loss of predicting token t + 1 counts; `asked`
    [B, P]: positions whose attention teaches the indexer; `digits` [B, Q, 4]: positions that predict the
    digits of each answer (recall only)."""

    tokens: Tensor
    weight: Tensor
    asked: Tensor
    digits: Tensor | None


def recall_batch(rng: np.random.Generator, sequences: int, pairs: int, device: str) -> Batch:
    """`sequences` documents of `pairs` records and 24 questions (fewer when there are few records)."""
    records, answer_tokens = RECORD_CHARACTERS, 4
    length = 7 + (pairs + QUERIES) * records + 1
    tokens = np.full((sequences, length), NEWLINE, dtype=np.int64)
    weight = np.zeros((sequences, length - 1), dtype=np.float32)
    digits = np.zeros((sequences, QUERIES, answer_tokens), dtype=np.int64)
    letters = rng.integers(0, 26**4, (sequences, pairs * 2))
    values = rng.integers(0, 10, (sequences, pairs, 4))
    near = WINDOW_CHARACTERS // records + 1
    for row in range(sequences):
        offset = int(rng.integers(0, 8))
        keys = np.unique(letters[row])
        rng.shuffle(keys)
        keys = _spelled(keys[:pairs])
        table = np.empty((len(keys), records), dtype=np.int64)
        table[:, :4] = keys
        table[:, 4] = EQUALS
        table[:, 5:9] = values[row, : len(keys)] + ord("0") + OFFSET
        table[:, 9] = NEWLINE
        tokens[row, :offset] = rng.integers(97, 123, offset) + OFFSET
        begin = offset + table.size
        tokens[row, offset:begin] = table.reshape(-1)
        asked: list[int] = []
        for query in range(QUERIES):
            # Neither a record nor its earlier answer lies inside the window, where there is room for that.
            old = max(len(keys) - max(near - query, 0), 1)
            recent = set(asked[-near:])
            pick = int(rng.integers(0, old))
            for _ in range(8):
                if pick not in recent:
                    break
                pick = int(rng.integers(0, old))
            asked.append(pick)
        lines = table[asked].copy()
        lines[:, 4] = QUESTION
        tokens[row, begin : begin + lines.size] = lines.reshape(-1)
        first = begin + np.arange(QUERIES)[:, None] * records + 4 + np.arange(4)
        digits[row] = first
        weight[row, first.reshape(-1)] = 1
        weight[row, (first[:, -1] + 1)] = 0.2  # the newline behind an answer
        end = begin + lines.size
        tokens[row, end] = EOS
        weight[row, end - 1] = 0.2 if end - 1 < length - 1 else 0
    asked_at = digits.reshape(sequences, -1)
    return Batch(*(torch.from_numpy(a).to(device) for a in (tokens, weight, asked_at, digits)))


def _spelled(keys: np.ndarray) -> np.ndarray:
    letters = np.stack([keys // 26**power % 26 for power in range(4)], axis=1)
    return letters + ord("a") + OFFSET


class Text:
    """Windows of the corpus; the last hundredth is held out."""

    def __init__(self, path: Path) -> None:
        raw = np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.uint8).astype(np.int64)
        tokens = np.where(raw == 0, EOS, raw + OFFSET)
        split = len(tokens) - len(tokens) // 100
        self.train, self.held_out = tokens[:split], tokens[split:]

    def batch(
        self, rng: np.random.Generator, sequences: int, length: int, device: str, held_out: bool = False
    ) -> Batch:
        source = self.held_out if held_out else self.train
        starts = rng.integers(0, len(source) - length - 1, sequences)
        tokens = np.stack([source[s : s + length + 1] for s in starts])
        asked = np.sort(rng.integers(length // 8, length, (sequences, 48)), axis=1)
        weight = np.ones((sequences, length), dtype=np.float32)
        made = (torch.from_numpy(a).to(device) for a in (tokens, weight, asked))
        return Batch(*made, digits=None)
