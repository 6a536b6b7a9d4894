"""Batches: recall sequences made on the fly and windows of text, in the tokens of a codec."""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.evaluation.recall import KEY_LETTERS, VALUE_DIGITS, WINDOW_CHARACTERS
from tools.nano.codec import EOS, Codec

QUERIES = 24


@dataclass(frozen=True)
class Batch:
    """tokens [B, T + 1] int64; weight [B, T]: how much the loss of predicting token t + 1 counts; `asked`
    [B, P]: positions whose attention teaches the indexer; `digits` [B, Q, 4]: positions that predict the
    digits of each answer (recall only)."""

    tokens: Tensor
    weight: Tensor
    asked: Tensor
    digits: Tensor | None


def recall_batch(rng: np.random.Generator, codec: Codec, sequences: int, pairs: int, device: str) -> Batch:
    """`sequences` documents of `pairs` records and 24 questions; shorter ones are filled up with ends of sequence."""
    made = [_recall_document(rng, codec, pairs) for _ in range(sequences)]
    length = max(len(tokens) for tokens, _ in made)
    tokens = np.full((sequences, length), EOS, dtype=np.int64)
    weight = np.zeros((sequences, length - 1), dtype=np.float32)
    digits = np.stack([places for _, places in made])
    for row, (document, places) in enumerate(made):
        tokens[row, : len(document)] = document
        weight[row, places.reshape(-1)] = 1
        weight[row, places[:, -1] + 1] = 0.2  # the newline behind an answer
        weight[row, len(document) - 2] = 0.2
    asked = digits.reshape(sequences, -1)
    return Batch(*(torch.from_numpy(a).to(device) for a in (tokens, weight, asked, digits)))


def _recall_document(rng: np.random.Generator, codec: Codec, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and [24, 4] positions that predict the digits of the answers."""
    near = WINDOW_CHARACTERS // codec.least_record_tokens + 1
    spelled = np.unique(rng.integers(97, 123, (pairs * 2, KEY_LETTERS)).astype(np.uint8), axis=0)
    rng.shuffle(spelled)
    keys = codec.encode_many([bytes(key).decode() for key in spelled[:pairs]])
    values = codec.digits[rng.integers(0, 10, (len(keys), VALUE_DIGITS))].tolist()
    offset = bytes(rng.integers(97, 123, int(rng.integers(0, 8))).astype(np.uint8)).decode()
    # Letters before the first key may merge with it, as they do when a prompt is read as one text.
    spellings = [codec.encode(offset + bytes(spelled[0]).decode()), *keys[1:]]
    tokens: list[int] = []
    for key, value in zip(spellings, values, strict=True):
        tokens += [*key, codec.equals, *value, codec.newline]
    asked: list[int] = []
    places: list[int] = []
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
        tokens += [*keys[pick], codec.question]
        places.append(len(tokens) - 1)
        tokens += [*values[pick], codec.newline]
    tokens.append(EOS)
    return np.array(tokens, dtype=np.int64), np.array(places)[:, None] + np.arange(VALUE_DIGITS)


class Text:
    """Windows of the corpus; the last hundredth is held out."""

    def __init__(self, path: Path, codec: Codec) -> None:
        documents = [raw.decode() for raw in lzma.decompress(path.read_bytes()).split(b"\0")]
        tokens = np.concatenate([np.array([*ids, EOS], dtype=np.int64) for ids in codec.encode_many(documents)])
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
