"""What a load's samples say: percentiles, throughput, goodput under an objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.bench.load import Load, Sample

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Objective:
    """Milliseconds that a request's first text, its mean gap and the whole of it may take; 0 = any."""

    ttft_ms: float = 0.0
    gap_ms: float = 0.0
    total_ms: float = 0.0

    def met(self, sample: Sample) -> bool:
        if sample.error:
            return False
        mean_gap = sum(sample.gaps_s) / len(sample.gaps_s) if sample.gaps_s else 0.0
        in_time = not self.ttft_ms or sample.ttft_s * 1e3 <= self.ttft_ms
        in_time = in_time and (not self.total_ms or sample.total_s * 1e3 <= self.total_ms)
        return in_time and (not self.gap_ms or mean_gap * 1e3 <= self.gap_ms)


@dataclass(frozen=True)
class Summary:
    """Milliseconds by percentile; rates a second over the whole load; goodput counts what met the objective."""

    kind: str
    level: float
    requests: int
    failed: int
    seconds: float
    ttft_ms: dict[str, float]
    gap_ms: dict[str, float]
    total_ms: dict[str, float]
    tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    good_share: float
    errors: tuple[str, ...]


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile (share in 0 ... 100); NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


def summarise(load: Load, samples: Sequence[Sample], objective: Objective) -> Summary:
    good = [sample for sample in samples if not sample.error]
    seconds = max((sample.begun_s + sample.total_s for sample in samples), default=0.0)
    met = sum(objective.met(sample) for sample in samples)

    def milliseconds(values: Sequence[float]) -> dict[str, float]:
        found = {f"p{share}": percentile(values, share) * 1e3 for share in PERCENTILES}
        return found | {"mean": sum(values) / len(values) * 1e3 if values else math.nan}

    def rate(count: float) -> float:
        return count / seconds if seconds else 0.0

    return Summary(
        kind=load.kind,
        level=load.level,
        requests=len(samples),
        failed=len(samples) - len(good),
        seconds=seconds,
        ttft_ms=milliseconds([s.ttft_s for s in good]),
        gap_ms=milliseconds([gap for s in good for gap in s.gaps_s]),
        total_ms=milliseconds([s.total_s for s in good]),
        tokens_per_s=rate(sum(s.tokens for s in good)),
        requests_per_s=rate(len(good)),
        goodput_per_s=rate(met),
        good_share=met / len(samples) if samples else 0.0,
        errors=tuple(sorted({s.error for s in samples if s.error}))[:5],
    )
