"""Could swap-in begin before the selection is known? What predictions hit, and what they move in vain.

    python -m benchmarks.predictive_swap_in [--contexts 4000 8000 16000] [--steps 160]

Decodes real text with dsv4-nano and records which entries every C4 layer selects in every step. Hot buffers of several
sizes are then replayed over these selections, as `KVKernels.swap_in` defines them, without and with rows that are
fetched early. Predictions of a layer's selection: its own of the last step, the entries beside those, the runners-up
of the last step's scores, and what the C4 layer before it selected in this step. A fetched row takes the place of the
least recently used one: a wrong one costs a copy and may evict what is needed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from common.evaluation.recall import make_question
from common.model import attention
from common.model.checkpoint import load_weights
from common.model.config import ModelConfig
from common.model.indexer import decode_selection
from common.model.model import DeepSeekV4Model, PrefillChunk
from tests.support.local_kv import LocalBatch, LocalSequence

ROOT = Path(__file__).resolve().parents[1]
NANO = ROOT / "models" / "dsv4-nano"
CHUNK_TOKENS = 512
BYTE_OFFSET = 4
# Steps in which an empty hot buffer fills; not counted.
WARM_UP = 16


@dataclass(frozen=True)
class Step:
    """One layer in one step: entries selected, the next best (best first), and how many entries there were."""

    selected: tuple[int, ...]
    runners_up: tuple[int, ...]
    count: int


@dataclass
class Recorder:
    """Stands where the model calls `decode_selection`; steps[i] are those of the i-th C4 layer."""

    layers: int
    steps: list[list[Step]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = [[] for _ in range(self.layers)]
        self._calls = 0

    def __call__(
        self, queries: Tensor, head_weights: Tensor, keys: list[Tensor], counts: Tensor, everything: Tensor
    ) -> Tensor:
        topk, count = everything.shape[1], int(counts[0])
        chosen = decode_selection(queries, head_weights, keys, counts, everything)
        products = torch.mm(queries[0], keys[0][:count].t()).relu_()
        scores = (products * head_weights[0].unsqueeze(-1)).sum(0)
        scores[chosen[0]] = -torch.inf
        runners_up = scores.topk(min(topk, count - topk)).indices
        found = Step(tuple(chosen[0].tolist()), tuple(runners_up.tolist()), count)
        self.steps[self._calls % self.layers].append(found)
        self._calls += 1
        return chosen


def record(model: DeepSeekV4Model, tokens: list[int], context: int) -> list[list[Step]]:
    """Selections while tokens[context:] are decoded one by one behind the prompt tokens[:context]."""
    ids = torch.tensor(tokens)
    sequence = LocalSequence(model.config)
    for start in range(0, context, CHUNK_TOKENS):
        model.prefill([PrefillChunk(ids[start : min(start + CHUNK_TOKENS, context)], sequence, "none")])
    recorder = Recorder(len(model.config.layers_of(4)))
    batch = LocalBatch([sequence])
    attention.decode_selection = recorder  # type: ignore[assignment]
    try:
        for token in ids[context:]:
            model.decode(token.unsqueeze(0), batch)
            batch.advance()
    finally:
        attention.decode_selection = decode_selection
    return recorder.steps


def recall_text(tokens: int, extra: int, seed: int) -> list[int]:
    """Records, then `extra` characters of one question and answer after another about them."""
    rng = random.Random(seed)
    text = make_question(rng, tokens - 5).prompt.rpartition("\n")[0] + "\n"
    records = [line.split("=") for line in text.splitlines() if len(line) == 9]
    context = len(text)
    while len(text) < context + extra:
        key, value = rng.choice(records)
        text += f"{key}?{value}\n"
    return [ord(character) + BYTE_OFFSET for character in text[: context + extra]]


def python_text(tokens: int, extra: int, seed: int) -> list[int]:
    """Sources of the standard library, as in the model's training."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(seed).shuffle(files)
    text = bytearray()
    for file in files:
        text += bytes(byte for byte in file.read_bytes() if byte < 128)
        if len(text) >= tokens + extra:
            break
    return [byte + BYTE_OFFSET for byte in text[: tokens + extra]]


Predict = Callable[[list[list[Step]], int, int], Iterable[int]]


def _last(steps: list[list[Step]], layer: int, step: int) -> Iterable[int]:
    return steps[layer][step - 1].selected


def _beside(steps: list[list[Step]], layer: int, step: int) -> Iterable[int]:
    before = steps[layer][step - 1]
    return [e + d for e in before.selected for d in (1, -1) if 0 <= e + d < before.count]


def _runners_up(share: float) -> Predict:
    def predict(steps: list[list[Step]], layer: int, step: int) -> Iterable[int]:
        before = steps[layer][step - 1]
        return before.runners_up[: int(len(before.selected) * share)]

    return predict


def _layer_before(steps: list[list[Step]], layer: int, step: int) -> Iterable[int]:
    return steps[layer - 1][step].selected if layer else ()


PREDICTIONS: dict[str, Predict] = {
    "none": lambda _steps, _layer, _step: (),
    "own selection, last step": _last,
    "entries beside it": _beside,
    "runners-up, 1/8 k": _runners_up(1 / 8),
    "runners-up, k": _runners_up(1),
    "layer before, this step": _layer_before,
}


@dataclass
class Counts:
    """Sums over steps and layers: entries selected (the newest left out), fetched on demand, fetched early, and of
    these how many the step then selected."""

    turns: int = 0
    selected: int = 0
    demanded: int = 0
    early: int = 0
    early_used: int = 0


def replay(steps: list[list[Step]], layer: int, rows: int, predict: Predict, into: Counts) -> None:
    """A hot buffer of `rows` rows over one layer's selections; see KVKernels.swap_in for the order of rows."""
    order: list[int] = []
    for number, step in enumerate(steps[layer]):
        newest = step.count - 1
        wanted = [entry for entry in step.selected if entry != newest]
        early: list[int] = []
        if number:
            held = set(order)
            guessed = dict.fromkeys(predict(steps, layer, number))
            early = [entry for entry in guessed if entry not in held and entry < newest][:rows]
            order = _turn(order, early, set(), rows)
        held, needed = set(order), set(wanted)
        missed = [entry for entry in wanted if entry not in held]
        order = _turn(order, missed, needed & held, rows)
        if number >= WARM_UP:
            into.turns += 1
            into.selected += len(wanted)
            into.demanded += len(missed)
            into.early += len(early)
            into.early_used += len(needed.intersection(early))


def _turn(order: list[int], loaded: list[int], hits: set[int], rows: int) -> list[int]:
    """Rows from least to most recently used: those left unused, those just loaded, hits."""
    unused = [entry for entry in order if entry not in hits]
    over = max(0, len(order) + len(loaded) - rows)
    return [*unused[over:], *loaded, *(entry for entry in order if entry in hits)]


def overlap(steps: list[list[Step]]) -> tuple[float, float]:
    """Shares of a selection that its own layer selected in the last step, and the layer before in the same step."""
    own = [
        len(set(a.selected) & set(b.selected)) / len(b.selected)
        for layer in steps
        for a, b in itertools.pairwise(layer)
    ]
    before = [
        len(set(a.selected) & set(b.selected)) / len(b.selected)
        for upper, lower in itertools.pairwise(steps)
        for a, b in zip(upper, lower, strict=True)
    ]
    return sum(own) / len(own), sum(before) / len(before)


def swap_in_times() -> dict[int, tuple[float, float]]:
    """By requests: microseconds of one swap-in of 512 entries each with nothing and with everything missing, as
    recorded on the GPU (the lines that also name the public implementation)."""
    found: dict[int, dict[int, float]] = {}
    pattern = re.compile(r"swap-in +(\d+) x 512, +(\d+)% missing.* ([\d.]+) us .*public")
    for line in (ROOT / "benchmarks" / "results" / "gpu_kernels.txt").read_text().splitlines():
        match = pattern.search(line)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = float(match[3])
    return {requests: (times[0], times[100]) for requests, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4000, 8000, 16000])
    parser.add_argument("--steps", type=int, default=160)
    options = parser.parse_args()
    if options.steps <= 2 * WARM_UP:
        parser.error(f"--steps is {options.steps}; {WARM_UP} of them only fill the buffer")
    config = ModelConfig.from_file(NANO)
    model = DeepSeekV4Model(config, load_weights(NANO, config))
    topk = config.index_topk
    traces: list[tuple[str, list[list[Step]]]] = []
    print(f"dsv4-nano, top-{topk}, C4 layers {config.layers_of(4)}, {options.steps} steps of given text")
    print(f"{'text':<8}{'context':>8}{'entries':>9}{'same as last step':>19}{'as layer before':>17}")
    for context in options.contexts:
        for name, text in (("recall", recall_text), ("python", python_text)):
            tokens = text(context, options.steps, seed=context)
            steps = record(model, tokens, len(tokens) - options.steps)
            traces.append((name, steps))
            own, before = overlap(steps)
            print(f"{name:<8}{context:>8}{steps[0][0].count:>9}{own:>19.1%}{before:>17.1%}", flush=True)
    times = swap_in_times()
    small, large = min(times), max(times)
    rises = {requests: (times[requests][1] - times[requests][0]) / 512 for requests in (small, large)}
    print(
        f"\nPer layer and step: rows fetched on demand, fetched early, of these in vain; and, for {large} requests of "
        f"top-512\nwith the same shares, microseconds on the critical path when early copies are wholly hidden, and "
        f"when they are not\n(recorded swap-in: {times[large][0]} us + {rises[large]:.3f} us a missing entry of all)"
    )
    print(
        f"{'text':<8}{'rows':>9}  {'prediction':<26}{'missing':>8}{'demand':>8}{'early':>8}{'in vain':>9}"
        f"{'hidden':>9}{'not':>8}"
    )
    for name in ("recall", "python"):
        for factor in (1, 1.5, 2, 4, 8):
            rows = int(topk * factor)
            for label, predict in PREDICTIONS.items():
                counts = Counts()
                for text, steps in traces:
                    if text == name:
                        for layer in range(len(steps)):
                            replay(steps, layer, rows, predict, counts)
                scale = 512 / topk / counts.turns
                hidden = times[large][0] + rises[large] * counts.demanded * scale
                shown = hidden + rises[large] * counts.early * scale + (times[large][0] if counts.early else 0.0)
                print(
                    f"{name:<8}{factor:>7}k  {label:<26}{counts.demanded / counts.selected:>8.1%}"
                    f"{counts.demanded / counts.turns:>8.2f}{counts.early / counts.turns:>8.2f}"
                    f"{(counts.early - counts.early_used) / counts.turns:>9.2f}{hidden:>9.1f}{shown:>8.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
