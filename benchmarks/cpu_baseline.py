"""Prefill and decode tokens/s on the CPU against `transformers`, same checkpoint, same run.

    python -m benchmarks.cpu_baseline [--model DIR] [--threads 2] [--same-allocator]

Without --model a seeded small checkpoint (11 M parameters, true row widths) is written to a temporary
directory. Both sides compute in fp32, each in a process of its own: ours with the allocator setting the services
make, `transformers` as it comes (or with the same setting: --same-allocator). They take turns; a figure is the
median. Ours goes through the serving arithmetic: every row that attention reads has been quantised to fp8 and
back, by an unpaged store; it stands for the model, not for the services around it.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, Protocol

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


class Side(Protocol):
    """One implementation: `prefill` starts anew with [B, T] prompts, `decode` goes on greedily from there."""

    def prefill(self, token_ids: Tensor) -> None: ...

    def decode(self, steps: int) -> None: ...


class Ours:
    def __init__(self, directory: Path) -> None:
        config = ModelConfig.from_file(directory)
        self._model = DeepSeekV4Model(config, load_weights(directory, config))

    def prefill(self, token_ids: Tensor) -> None:
        """One prompt after another, as the service does when each fills a step's token budget."""
        sequences = [LocalSequence(self._model.config) for _ in token_ids]
        for sequence, ids in zip(sequences, token_ids, strict=True):
            for start in range(0, len(ids), CHUNK_TOKENS):
                last = start + CHUNK_TOKENS >= len(ids)
                piece = ids[start : start + CHUNK_TOKENS]
                self._model.prefill([PrefillChunk(piece, sequence, "last" if last else "none")])
        self._batch = LocalBatch(sequences)
        self._tokens = token_ids[:, -1]

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._tokens = self._model.decode(self._tokens, self._batch).argmax(-1)
            self._batch.advance()


class Theirs:
    def __init__(self, directory: Path) -> None:
        self._model = DeepseekV4ForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def prefill(self, token_ids: Tensor) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self._model(token_ids, cache=self._cache, use_cache=True, logits_to_keep=1)
        self._tokens = token_ids[:, -1]

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            logits = self._model(self._tokens.unsqueeze(1), cache=self._cache, use_cache=True).logits
            self._tokens = logits[:, -1].argmax(-1)


def serve(
    side: Literal["ours", "theirs"], directory: Path, threads: int, keep_memory: bool, orders: Connection
) -> None:
    """Child process: answers ("prefill", batch) and ("decode", steps) with seconds, until None."""
    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)
    if keep_memory:
        keep_freed_memory()
    engine: Side = Ours(directory) if side == "ours" else Theirs(directory)
    vocabulary = ModelConfig.from_file(directory).vocab_size
    with torch.inference_mode():
        orders.send("ready")
        while (order := orders.recv()) is not None:
            what, amount = order
            if what == "prefill":
                generator = torch.Generator().manual_seed(amount)
                token_ids = torch.randint(2, vocabulary, (amount, PREFILL_TOKENS), generator=generator)
                start = time.perf_counter()
                engine.prefill(token_ids)
            else:
                start = time.perf_counter()
                engine.decode(amount)
            orders.send(time.perf_counter() - start)


def measure(sides: dict[str, Connection], what: str, amount: int, repeats: int) -> dict[str, float]:
    """Median seconds of each side, taking turns after one unmeasured round."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, orders in sides.items():
            orders.send((what, amount))
            found[name].append(orders.recv())
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


def report(what: str, tokens: int, seconds: dict[str, float], aim: str) -> None:
    ratio = seconds["theirs"] / seconds["ours"]
    ours, theirs = tokens / seconds["ours"], tokens / seconds["theirs"]
    print(f"{what:26}{ours:12.1f}{theirs:15.1f}{ratio:9.2f}   {aim}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint directory in the native format, bf16 or fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="decode steps a repeat")
    parser.add_argument("--same-allocator", action="store_true", help="keep freed memory on both sides")
    options = parser.parse_args()
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model
        if directory is None:
            directory = Path(scratch) / "small"
            write_small_checkpoint(directory, seed=0, stored="bf16")
        sides: dict[str, Connection] = {}
        children = []
        for name in ("ours", "theirs"):
            near, far = spawning.Pipe()
            keep = name == "ours" or options.same_allocator
            child = spawning.Process(target=serve, args=(name, directory, options.threads, keep, far), daemon=True)
            child.start()
            far.close()
            children.append(child)
            sides[name] = near
        for orders in sides.values():
            orders.recv()
    print(f"{options.threads} threads, fp32, medians of {options.repeats}")
    print(f"{'tokens/s':26}{'ours':>12}{'transformers':>15}{'ratio':>9}   aim", flush=True)
    for batch in (1, 8):
        seconds = measure(sides, "prefill", batch, options.repeats if batch == 1 else max(1, options.repeats // 2))
        report(f"prefill {PREFILL_TOKENS}, batch {batch}", batch * PREFILL_TOKENS, seconds, ">= 3")
        seconds = measure(sides, "decode", options.steps, options.repeats)
        aim = ">= 5" if batch == 8 else ""
        report(f"decode at {PREFILL_TOKENS}, batch {batch}", batch * options.steps, seconds, aim)
    for orders, child in zip(sides.values(), children, strict=True):
        orders.send(None)
        child.join()


if __name__ == "__main__":
    main()
