"""Figures of one or several saved runs: latency and goodput against load, occupancy over time."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SERIES = (
    ("ttft_ms", "time to first text, ms"),
    ("gap_ms", "gap between pieces of text, ms"),
    ("total_ms", "whole request, ms"),
)


class FiguresUnavailableError(RuntimeError):
    """matplotlib is not installed; the message says how to get it."""


def draw(runs: Mapping[str, dict[str, Any]], target: Path) -> None:
    """Writes one PNG with every run (as `dsv4-pd bench run --json` saved it) in each panel. Raises
    FiguresUnavailableError."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        plots: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise FiguresUnavailableError("figures need matplotlib: pip install 'dsv4-pd[bench]'") from None
    watched = {name: run["occupancy"] for name, run in runs.items() if run["occupancy"]}
    panels = len(SERIES) + 1 + bool(watched)
    figure, axes = plots.subplots(1, panels, figsize=(4.6 * panels, 3.8), constrained_layout=True)
    for axis, (key, title) in zip(axes, SERIES, strict=False):
        for name, run in runs.items():
            levels = [point["level"] for point in run["points"]]
            median, tail = ([_number(point[key][p]) for point in run["points"]] for p in ("p50", "p99"))
            (line,) = axis.plot(levels, median, marker="o", label=f"{name} p50")
            axis.plot(levels, tail, "--", color=line.get_color(), label=f"{name} p99")
        axis.set_title(title)
    for name, run in runs.items():
        levels = [point["level"] for point in run["points"]]
        axes[len(SERIES)].plot(levels, [point["goodput_per_s"] for point in run["points"]], marker="o", label=name)
    axes[len(SERIES)].set_title("good requests a second")
    kinds = sorted({point["kind"] for run in runs.values() for point in run["points"]})
    label = " / ".join("requests a second" if kind == "open" else "requests at a time" for kind in kinds)
    for axis in axes[: len(SERIES) + 1]:
        axis.set_xlabel(label)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")
    if watched:
        axis = axes[-1]
        for name, lines in watched.items():
            pools = sorted({pool for _, pages in lines for pool, _ in pages})
            for pool in pools:
                axis.plot(
                    [seconds for seconds, _ in lines],
                    [dict(map(tuple, pages)).get(pool, 0.0) for _, pages in lines],
                    label=f"{name} {pool}",
                )
        axis.set_title("pages and slots in use")
        axis.set_xlabel("seconds")
        axis.legend(fontsize="small")
    figure.savefig(target, dpi=120)
    plots.close(figure)


def _number(saved: float | None) -> float:
    """A saved percentile; a gap in the line where there was nothing to take it of."""
    return math.nan if saved is None else saved
