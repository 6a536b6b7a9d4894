"""Prefill and decode tokens/s on the CPU against `transformers`, same checkpoint, same run.

    python benchmarks/cpu_baseline.py [--model DIR] [--threads 2]

Without --model a seeded small checkpoint (11 M parameters, true row widths) is written to a temporary
directory. Both sides compute in fp32. Ours goes through the serving arithmetic: every row that attention reads
has been quantised to fp8 and back by an unpaged store. The two sides take turns; each figure is the median.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM, DynamicCache

from common.model.checkpoint import load_weights
from common.model.config import ModelConfig
from common.model.memory import keep_freed_memory
from common.model.model import DeepSeekV4Model, PrefillChunk
from common.model.small_checkpoint import write_small_checkpoint
from tests.support.local_kv import LocalBatch, LocalSequence

PREFILL_TOKENS = 1000
CHUNK_TOKENS = 1024


def elapsed_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def prompts(config: ModelConfig, batch: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(2, config.vocab_size, (batch, tokens), generator=generator)


def ours_prefilled(model: DeepSeekV4Model, token_ids: Tensor) -> list[LocalSequence]:
    """Prefilled one after another, as the service does when each fills a step's token budget."""
    sequences = [LocalSequence(model.config) for _ in token_ids]
    for sequence, ids in zip(sequences, token_ids, strict=True):
        for start in range(0, len(ids), CHUNK_TOKENS):
            piece = ids[start : start + CHUNK_TOKENS]
            last = start + CHUNK_TOKENS >= len(ids)
            model.prefill([PrefillChunk(piece, sequence, "last" if last else "none")])
    return sequences


def theirs_prefilled(model: DeepseekV4ForCausalLM, token_ids: Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def ours_decoded(model: DeepSeekV4Model, batch: LocalBatch, tokens: Tensor, steps: int) -> None:
    with torch.inference_mode():
        for _ in range(steps):
            tokens = model.decode(tokens, batch).argmax(-1)
            batch.advance()


def theirs_decoded(model: DeepseekV4ForCausalLM, cache: DynamicCache, tokens: Tensor, steps: int) -> None:
    with torch.inference_mode():
        for _ in range(steps):
            logits = model(tokens.unsqueeze(1), past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1].argmax(-1)


def report(what: str, tokens: int, ours_s: list[float], theirs_s: list[float], aim: str) -> None:
    ours, theirs = tokens / statistics.median(ours_s), tokens / statistics.median(theirs_s)
    print(f"{what:34} {ours:12.1f} {theirs:14.1f} {ours / theirs:8.2f}   {aim}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint directory in the native format, bf16 or fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="decode steps a repeat")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model
        if directory is None:
            directory = Path(scratch) / "small"
            write_small_checkpoint(directory, seed=0, stored="bf16")
        config = ModelConfig.from_file(directory)
        ours = DeepSeekV4Model(config, load_weights(directory, config))
        theirs = DeepseekV4ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        theirs.eval()
    parameters = sum(parameter.numel() for parameter in theirs.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {options.threads} threads, fp32, median of {options.repeats}")
    print(f"{'tokens/s':34} {'ours':>12} {'transformers':>14} {'ratio':>8}   aim")
    for batch in (1, 8):
        token_ids = prompts(config, batch, PREFILL_TOKENS)
        ours_prefilled(ours, token_ids[:1])
        theirs_prefilled(theirs, token_ids[:1])
        ours_s, theirs_s = [], []
        for _ in range(max(1, options.repeats // (2 if batch > 1 else 1))):
            ours_s.append(elapsed_s(lambda: ours_prefilled(ours, token_ids)))
            theirs_s.append(elapsed_s(lambda: theirs_prefilled(theirs, token_ids)))
        report(f"prefill {PREFILL_TOKENS}, batch {batch}", batch * PREFILL_TOKENS, ours_s, theirs_s, ">= 3")
        local = LocalBatch(ours_prefilled(ours, token_ids))
        cache = theirs_prefilled(theirs, token_ids)
        tokens = token_ids[:, -1]
        ours_decoded(ours, local, tokens, 4)
        theirs_decoded(theirs, cache, tokens, 4)
        ours_s, theirs_s = [], []
        for _ in range(options.repeats):
            ours_s.append(elapsed_s(lambda: ours_decoded(ours, local, tokens, options.steps)))
            theirs_s.append(elapsed_s(lambda: theirs_decoded(theirs, cache, tokens, options.steps)))
        aim = ">= 5" if batch == 8 else ""
        report(f"decode at {PREFILL_TOKENS}, batch {batch}", batch * options.steps, ours_s, theirs_s, aim)


if __name__ == "__main__":
    main()
