"""Exact match of recall at several lengths, and text continuations, as the exported model would answer."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from common.evaluation.recall import VALUE_DIGITS, make_question
from tools.nano.data import OFFSET, Text
from tools.nano.dense_model import DenseModel, Options


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a proportion."""
    z, p = 1.96, right / total
    centre = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return centre - half, centre + half


@torch.no_grad()
def exact_match(
    model: DenseModel, characters: int, count: int, device: str, step_tokens: int = 65536
) -> dict[str, Any]:
    """All four digits right; teacher-forced argmax, which is right exactly when greedy decoding is."""
    model.options = Options(topk=64, quantise_kv=True, quantise_weights=True)
    rng = random.Random(1234 + characters)
    right = 0
    done = 0
    while done < count:
        batch = [make_question(rng, characters) for _ in range(min(max(1, step_tokens // characters), count - done))]
        texts = [q.prompt + q.answer for q in batch]
        longest = max(map(len, texts))
        tokens = torch.full((len(batch), longest), OFFSET + 10)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor([b + OFFSET for b in text.encode()])
        tokens = tokens.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden, _, _ = model(tokens)
            ends = torch.tensor([len(text) for text in texts], device=device)
            places = ends[:, None] - VALUE_DIGITS - 1 + torch.arange(VALUE_DIGITS, device=device)
            rows = torch.arange(len(batch), device=device)[:, None]
            guessed = model.logits(hidden[rows, places]).argmax(-1)
        right += int((guessed == tokens[rows, places + 1]).all(1).sum())
        done += len(batch)
    low, high = wilson(right, done)
    model.options = Options()
    return {"characters": characters, "n": done, "exact_match": right / done, "low": low, "high": high}


@torch.no_grad()
def text_loss(model: DenseModel, text: Text, device: str) -> float:
    """Cross-entropy in nats a byte on held-out text, windows of 1 024."""
    import numpy as np

    model.options = Options(topk=64, quantise_kv=True, quantise_weights=True)
    windows = 48 if device == "cuda" else 2
    batch = text.batch(np.random.default_rng(5), windows, 1024, "cpu", held_out=True)
    tokens = batch.tokens.to(device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden, _, _ = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(model.logits(hidden).flatten(0, 1), tokens[:, 1:].flatten())
    model.options = Options()
    return float(loss)
