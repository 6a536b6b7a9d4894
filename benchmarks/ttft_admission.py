"""Time to first token with direct and with staged admission, in one run.

    python -m benchmarks.ttft_admission [--model DIR] [--device cuda] [--lengths 2048,8192] [--rates 0,0.5]

One prefill service and two decode services, one for each way; requests go to them in turns, so that whatever else the
machine does meets both. Rate 0: one request after another. Rate r: arrivals at random (Poisson), at r of what prefill
can compute, so that prompts queue. Requests at the longest lengths are fewer (--seconds bounds one line of the table).
TTFT is measured at the client of the decode service: queueing, computing, transfer, admission and first token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.pair import ask, prompt, start
from common.cli.up import default_model
from common.model.config import ModelConfig
from tests.support.processes import Service

WAYS = ("direct", "staged")


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Line:
    """One length and rate: TTFTs in ms of each way."""

    def __init__(self, prefill: Service, decodes: dict[str, Service], vocabulary: int, length: int) -> None:
        self._prefill = prefill
        self._decodes = decodes
        self._vocabulary = vocabulary
        self._length = length
        self._lock = threading.Lock()
        self.found: dict[str, list[float]] = {way: [] for way in WAYS}

    def one(self, way: str, seed: int) -> None:
        timed = ask(self._decodes[way], self._prefill, prompt(self._length, self._vocabulary, seed))
        with self._lock:
            self.found[way].append(timed.ttft_s * 1e3)

    def in_turn(self, count: int) -> None:
        for index in range(count):
            for way in WAYS if index % 2 == 0 else WAYS[::-1]:
                self.one(way, index)

    def arriving(self, count: int, mean_gap_s: float, seed: int) -> None:
        """The same arrivals for both ways, one way after the other so that they don't queue behind each other."""
        for way in WAYS:
            rng = random.Random(seed)
            threads: list[threading.Thread] = []
            for index in range(count):
                time.sleep(rng.expovariate(1 / mean_gap_s))
                threads.append(threading.Thread(target=self.one, args=(way, index)))
                threads[-1].start()
            for thread in threads:
                thread.join()

    def print(self, rate: float) -> None:
        means = {way: statistics.mean(values) for way, values in self.found.items()}
        for way, values in self.found.items():
            gain = f"{1 - means['direct'] / means['staged']:>10.2%}" if way == "direct" else ""
            print(
                f"{self._length:>8}{rate:>7.2f}  {way:<8}{len(values):>5}{means[way]:>11.1f}"
                f"{statistics.median(values):>11.1f}{percentile(values, 0.99):>11.1f}{gain}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--rates", default="0,0.5")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ttft-admission-"))
    model = arguments.model or default_model(folder)
    vocabulary = ModelConfig.from_file(model).vocab_size
    where = ("--device", arguments.device)
    services = {"prefill": start("prefill_service", folder, model, *where)}
    pages = ("--host-pages", "1024", "--logical-pages", "1024", "--max-requests", "16", "--staging-pages", "1024")
    for way in WAYS:
        services[way] = start("decode_service", folder, model, "--admission", way, *where, *pages, threads=1, name=way)
    decodes = {way: services[way] for way in WAYS}
    try:
        print(f"TTFT in ms, model {model.name}; the last column is how much lower the mean is with direct admission")
        print(f"{'tokens':>8}{'rate':>7}  {'':<8}{'n':>5}{'mean':>11}{'median':>11}{'p99':>11}{'lower':>10}")
        for length in (int(text) for text in arguments.lengths.split(",")):
            warm = Line(services["prefill"], decodes, vocabulary, length)
            warm.in_turn(1)
            service_s = statistics.mean(warm.found["direct"]) / 1e3
            count = max(2, min(arguments.requests, int(arguments.seconds / 2 / service_s)))
            for rate in (float(text) for text in arguments.rates.split(",")):
                line = Line(services["prefill"], decodes, vocabulary, length)
                if rate:
                    line.arriving(count, service_s / rate, length)
                else:
                    line.in_turn(count)
                line.print(rate)
    finally:
        for service in services.values():
            service.stop()


if __name__ == "__main__":
    main()
