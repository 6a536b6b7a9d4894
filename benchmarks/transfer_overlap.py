"""How much of a handover hides behind prefill: computing, transfer and exposed transfer at 16 k tokens.

    python -m benchmarks.transfer_overlap [--model DIR] [--tokens 16384] [--runs 5] [--threads 2]

One prefill and one decode process on this machine, real Mooncake over TCP on loopback. "exposed" is what is left to
send when the last chunk is computed: last chunk computed to last byte acknowledged. Aim: 5 % of prefill's time.
"digest ms" is what decode spent on checking, on threads beside the engine's, from event to result.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.pair import ask, prompt, start
from common.cli.up import default_model
from common.model.config import ModelConfig

AIM = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="transfer-overlap-"))
    model = arguments.model or default_model(folder)
    vocabulary = ModelConfig.from_file(model).vocab_size
    prefill = start("prefill_service", folder, model, threads=arguments.threads)
    decode = start("decode_service", folder, model, threads=1)
    try:
        ask(decode, prefill, prompt(1024, vocabulary, 0))
        print(f"{arguments.tokens} tokens, {arguments.runs} runs, {arguments.threads} threads, model {model.name}")
        print(
            f"{'prefill ms':>12}{'transfer ms':>13}{'exposed ms':>12}{'exposed':>10}{'MB':>9}{'GB/s':>8}"
            f"{'digest ms':>11}"
        )
        shares: list[float] = []
        for run in range(arguments.runs):
            before = decode.status().counters["digest_seconds"]
            timings = ask(decode, prefill, prompt(arguments.tokens, vocabulary, run)).finished.prefill
            share = timings.exposed_transfer_ns / timings.compute_ns
            shares.append(share)
            print(
                f"{timings.compute_ns / 1e6:>12.0f}{timings.transfer_ns / 1e6:>13.1f}"
                f"{timings.exposed_transfer_ns / 1e6:>12.1f}{share:>10.2%}{timings.bytes_sent / 1e6:>9.1f}"
                f"{timings.bytes_sent / timings.transfer_ns:>8.2f}"
                f"{(decode.status().counters['digest_seconds'] - before) * 1e3:>11.1f}"
            )
        print(f"exposed, median: {statistics.median(shares):.2%} of prefill; aim: at most {AIM:.0%}")
    finally:
        decode.stop()
        prefill.stop()


if __name__ == "__main__":
    main()
