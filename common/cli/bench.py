"""`dsv4-pd bench`: load on a running system, and figures of what it did."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from common.bench.figures import FiguresUnavailableError, draw
from common.bench.load import Load, Metric, Sample, run_load, watch_metrics
from common.bench.report import Objective, Summary, summarise

app = typer.Typer(no_args_is_help=True, help="Load on a running system, and figures of what it did.")
FIRST_TOKEN_ID = 4
VOCABULARY = 256
WATCH_INTERVAL_S = 0.5


@app.command("run")
def run_command(
    url: Annotated[str, typer.Option(help="the router's address")] = "http://127.0.0.1:8000",
    rate: Annotated[list[float] | None, typer.Option(help="arrivals a second (open loop); may be repeated")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="requests at a time (closed loop); likewise")] = None,
    requests: Annotated[int, typer.Option(min=1, help="requests for each level")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="tokens of a prompt")] = 1000,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 32,
    slo_ttft_ms: Annotated[float, typer.Option(min=0, help="first text within this is good; 0 = any")] = 0,
    slo_gap_ms: Annotated[float, typer.Option(min=0, help="mean gap within this is good; 0 = any")] = 0,
    slo_total_ms: Annotated[float, typer.Option(min=0, help="a whole request within this is good; 0 = any")] = 0,
    watch: Annotated[str, typer.Option(help="decode workers' metrics, http://host:port, comma separated")] = "",
    seed: Annotated[int, typer.Option(help="which prompts and arrivals")] = 0,
    save: Annotated[Path | None, typer.Option("--json", help="save everything measured here")] = None,
    figure: Annotated[Path | None, typer.Option(help="write a PNG here")] = None,
) -> None:
    """Random prompts at given rates or numbers at a time; prints percentiles and goodput. A key for the router is read
    from DSV4PD_API_KEY."""
    levels = [Load("open", level, requests, seed) for level in rate or []]
    levels += [Load("closed", level, requests, seed) for level in concurrency or ([] if rate else [1])]
    if any(load.level <= 0 for load in levels):
        raise typer.BadParameter("rates and numbers at a time must be above 0")
    objective = Objective(slo_ttft_ms, slo_gap_ms, slo_total_ms)
    workers = [part.strip().rstrip("/") for part in watch.split(",") if part.strip()]
    try:
        summaries, occupancy = asyncio.run(_measure(url, levels, prompt_tokens, max_tokens, seed, objective, workers))
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise typer.BadParameter(f"{type(error).__name__}: {error}", param_hint="--url") from None
    _show(summaries)
    saved = {
        "url": url,
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        "objective": asdict(objective),
        "points": [_without_nan(asdict(summary)) for summary in summaries],
        "occupancy": occupancy,
    }
    if save is not None:
        save.write_text(json.dumps(saved, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if figure is not None:
        _draw({save.stem if save else "run": json.loads(json.dumps(saved))}, figure)
    if any(summary.failed for summary in summaries):
        raise typer.Exit(1)


def _without_nan(point: dict[str, Any]) -> dict[str, Any]:
    """Percentiles of nothing as null: JSON has no NaN."""
    return {
        key: {name: None if math.isnan(ms) else ms for name, ms in value.items()} if isinstance(value, dict) else value
        for key, value in point.items()
    }


@app.command("compare")
def compare_command(
    runs: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="files of `bench run --json`")],
    figure: Annotated[Path, typer.Option(help="write a PNG here")] = Path("bench.png"),
) -> None:
    """Draws several saved runs into one figure."""
    try:
        _draw({path.stem: json.loads(path.read_text(encoding="utf-8")) for path in runs}, figure)
    except (KeyError, json.JSONDecodeError) as error:
        raise typer.BadParameter(f"not a saved run: {error}", param_hint="RUNS") from None


def _draw(runs: dict[str, dict[str, Any]], figure: Path) -> None:
    try:
        draw(runs, figure)
    except FiguresUnavailableError as error:
        raise typer.BadParameter(str(error), param_hint="--figure") from None
    Console(stderr=True).print(f"figure in {figure}")


async def _measure(
    url: str, levels: Sequence[Load], prompt_tokens: int, max_tokens: int, seed: int, objective: Objective,
    workers: Sequence[str],
) -> tuple[list[Summary], list[tuple[float, list[Metric]]]]:  # fmt: skip
    key = os.environ.get("DSV4PD_API_KEY", "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, timeout=10.0, headers=headers) as client:
        answer = await client.get("/v1/models")
        if answer.status_code != 200:
            raise ValueError(f"/v1/models answers {answer.status_code}: {answer.text[:200]}")
    occupancy: list[tuple[float, list[Metric]]] = []
    watching = asyncio.create_task(watch_metrics(workers, WATCH_INTERVAL_S, occupancy)) if workers else None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    summaries: list[Summary] = []
    # Drawn for all levels together: a prompt that an earlier level sent could be answered from a cache.
    bodies = iter(make_bodies(sum(load.requests for load in levels), prompt_tokens, max_tokens, seed))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for load in levels:
            what = f"{load.level:g}/s" if load.kind == "open" else f"{load.level:g} at a time"
            task = progress.add_task(what, total=load.requests)

            def on_sample(sample: Sample, task: Any = task) -> None:
                progress.update(task, advance=1)

            samples = await run_load(url, load, list(itertools.islice(bodies, load.requests)), headers, on_sample)
            summaries.append(summarise(load, samples, objective))
    if watching is not None:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return summaries, occupancy


def make_bodies(count: int, prompt_tokens: int, max_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of random token ids that every vocabulary has."""
    rng = random.Random(seed)  # noqa: S311 - prompts, not secrets
    return [
        {
            "prompt": [FIRST_TOKEN_ID + rng.randrange(VOCABULARY) for _ in range(prompt_tokens)],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(count)
    ]


def _show(summaries: Sequence[Summary]) -> None:
    heads = ("load", "ok", "failed", "TTFT p50", "p99", "gap p50", "p99", "whole p50", "p99")
    table = Table(*heads, "tokens/s", "req/s", "good/s")
    for s in summaries:
        load = f"{s.level:g}/s" if s.kind == "open" else f"{s.level:g} at a time"
        times = [f"{values[p]:.1f}" for values in (s.ttft_ms, s.gap_ms, s.total_ms) for p in ("p50", "p99")]
        rates = [f"{s.tokens_per_s:.1f}", f"{s.requests_per_s:.2f}", f"{s.goodput_per_s:.2f}"]
        table.add_row(load, str(s.requests - s.failed), str(s.failed), *times, *rates)
    console = Console()
    console.print(table)
    console.print("times in ms")
    for error in sorted({error for s in summaries for error in s.errors}):
        console.print(error, style="red", markup=False, soft_wrap=True)
