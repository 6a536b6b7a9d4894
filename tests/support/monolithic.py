"""The same model without the pair: one sequence, in this process. The oracle of what the services must say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.model.model import DeepSeekV4Model, PrefillChunk
from tests.support.local_kv import LocalBatch, LocalSequence


def prefill(model: DeepSeekV4Model, sequence: LocalSequence, token_ids: Sequence[int], chunk_tokens: int) -> Tensor:
    """Prefills `token_ids` from the sequence's present length in chunks that begin at multiples of
    `chunk_tokens`; returns the last token's logits [vocab]."""
    if not token_ids:
        raise ValueError("nothing to prefill")
    logits: Tensor | None = None
    done = 0
    while done < len(token_ids):
        room = chunk_tokens - sequence.length % chunk_tokens
        piece = token_ids[done : done + room]
        done += len(piece)
        wanted = "last" if done == len(token_ids) else "none"
        (logits,) = model.prefill([PrefillChunk(torch.tensor(piece), sequence, wanted)])
    if logits is None:
        raise RuntimeError("the last chunk returned no logits")
    return logits


def generate(
    model: DeepSeekV4Model,
    prompt_ids: Sequence[int],
    max_tokens: int,
    chunk_tokens: int = 256,
    quantise: bool = True,
    stop_at_eos: bool = True,
) -> list[int]:
    """Greedy continuation of one prompt: at most `max_tokens` ids, the end-of-sequence id included if it comes.

    Ties between logits go to the lower id, as in common/sampling.py.
    """
    sequence = LocalSequence(model.config, quantise)
    logits = prefill(model, sequence, prompt_ids, chunk_tokens)
    batch = LocalBatch([sequence])
    found: list[int] = []
    while len(found) < max_tokens:
        token = int(torch.argmax(logits))
        found.append(token)
        if stop_at_eos and token in model.config.eos_token_id:
            break
        if len(found) < max_tokens:
            logits = model.decode(torch.tensor([token]), batch)[0]
            batch.advance()
    return found
