"""What keeping KV in fp8 changes: logits and the likeliest token, against the same model with raw fp32 rows.

    python -m benchmarks.fp8_kv_effect [--model DIR] [--tokens 1000] [--seeds 4]

Quantised: window rows, C4 and C128 rows, index keys. Raw on both sides: compressor states. Without --model a
seeded untrained small checkpoint is used: its logits are nearly flat (see the margin printed), so it shows the
largest effect on the likeliest token one can meet; a trained model is surer of itself.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from common.model.checkpoint import load_weights
from common.model.config import ModelConfig
from common.model.model import DeepSeekV4Model, PrefillChunk
from common.model.small_checkpoint import write_small_checkpoint
from tests.support.local_kv import LocalBatch, LocalSequence

CHUNK_TOKENS = 256
DECODE_STEPS = 32


def logits_of(model: DeepSeekV4Model, token_ids: Tensor, quantise: bool) -> Tensor:
    """[T, vocab]: prefill in chunks, the last tokens by decoding."""
    sequence = LocalSequence(model.config, quantise)
    found: list[Tensor] = []
    prompt = len(token_ids) - DECODE_STEPS
    for start in range(0, prompt, CHUNK_TOKENS):
        piece = token_ids[start : min(start + CHUNK_TOKENS, prompt)]
        (logits,) = model.prefill([PrefillChunk(piece, sequence, "all")])
        if logits is not None:
            found.append(logits)
    batch = LocalBatch([sequence])
    for token in token_ids[prompt:]:
        found.append(model.decode(token.unsqueeze(0), batch))
        batch.advance()
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=4, help="texts, and models where none is given")
    options = parser.parse_args()
    if options.tokens <= DECODE_STEPS:
        parser.error(f"--tokens is {options.tokens}; it must exceed the {DECODE_STEPS} decoded ones")
    print(f"{'text':>5}{'logit std':>11}{'mean |d|':>11}{'max |d|':>10}{'top-1 same':>12}{'median margin':>15}")
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as scratch:
            directory = options.model
            if directory is None:
                directory = Path(scratch)
                write_small_checkpoint(directory, seed=seed, stored="fp8")
            config = ModelConfig.from_file(directory)
            model = DeepSeekV4Model(config, load_weights(directory, config))
        generator = torch.Generator().manual_seed(seed)
        token_ids = torch.randint(2, config.vocab_size, (options.tokens,), generator=generator)
        raw, kept = logits_of(model, token_ids, False), logits_of(model, token_ids, True)
        difference = (raw - kept).abs()
        same = (raw.argmax(-1) == kept.argmax(-1)).float().mean()
        best = raw.topk(2, dim=-1).values
        margin = (best[:, 0] - best[:, 1]).median()
        print(
            f"{seed:5}{float(raw.std()):11.3f}{float(difference.mean()):11.4f}{float(difference.max()):10.3f}"
            f"{float(same):12.4f}{float(margin):15.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
