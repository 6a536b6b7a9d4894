"""Exact match of recall at several lengths, text loss and continuations, as the exported model would answer."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from common.evaluation.recall import VALUE_DIGITS, make_question
from tools.nano.codec import EOS, Codec
from tools.nano.data import Text
from tools.nano.dense_model import DenseModel, Options

SERVED = Options(topk=64, quantise_kv=True, quantise_weights=True)
PROMPTS = ("The module provides ", "def read_file(path):\n", "Changed in version 3.8: ")


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a proportion."""
    z, p = 1.96, right / total
    centre = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return centre - half, centre + half


@torch.no_grad()
def exact_match(
    model: DenseModel, codec: Codec, context: int, count: int, device: str, step_tokens: int = 65536
) -> dict[str, Any]:
    """All four digits right, for prompts of about `context` characters, whatever the tokenizer makes of them;
    teacher-forced argmax, which is right exactly when greedy decoding is."""
    model.options = SERVED
    rng = random.Random(1234 + context)
    right = 0
    done = 0
    while done < count:
        questions = [make_question(rng, context) for _ in range(min(max(1, step_tokens // context), count - done))]
        texts = codec.encode_many([q.prompt + q.answer for q in questions])
        tokens = torch.full((len(texts), max(map(len, texts))), codec.newline)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        tokens = tokens.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden, _, _ = model(tokens)
            ends = torch.tensor([len(text) for text in texts], device=device)
            places = ends[:, None] - VALUE_DIGITS - 1 + torch.arange(VALUE_DIGITS, device=device)
            rows = torch.arange(len(texts), device=device)[:, None]
            guessed = model.logits(hidden[rows, places]).argmax(-1)
        right += int((guessed == tokens[rows, places + 1]).all(1).sum())
        done += len(texts)
    low, high = wilson(right, done)
    model.options = Options()
    return {"context": context, "n": done, "exact_match": right / done, "low": low, "high": high}


@torch.no_grad()
def text_loss(model: DenseModel, text: Text, codec: Codec, device: str) -> float:
    """Cross-entropy in nats a byte on held-out text, windows of 1 024 tokens."""
    model.options = SERVED
    windows = 48 if device == "cuda" else 2
    batch = text.batch(np.random.default_rng(5), windows, 1024, "cpu", held_out=True)
    tokens = batch.tokens.to(device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden, _, _ = model(tokens[:, :-1])
        loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    model.options = Options()
    # An end of sequence costs bits and is no byte of the text: counted as the one byte that separates documents.
    lengths = np.maximum(codec.byte_lengths[batch.tokens[:, 1:].numpy()], 1)
    return float(loss) / int(lengths.sum())


@torch.no_grad()
def continuations(model: DenseModel, codec: Codec, characters: int, temperature: float, device: str) -> dict[str, str]:
    """What the model writes behind each of PROMPTS, seeded."""
    model.options = SERVED
    found: dict[str, str] = {}
    for prompt in PROMPTS:
        generator = torch.Generator(device).manual_seed(1)
        tokens = codec.encode(prompt)
        while len(written := codec.decode(tokens)) < len(prompt) + characters:
            row = torch.tensor([tokens], device=device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                hidden, _, _ = model(row)
                logits = model.logits(hidden[:, -1])[0]
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
            if token == EOS:
                break
            tokens.append(token)
        found[prompt] = written[len(prompt) :]
    model.options = Options()
    return found
