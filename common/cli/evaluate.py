"""`dsv4-pd eval`: accuracy of a running system, over HTTP."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common.evaluation.client import Proportion, Reply, ask_all
from common.evaluation.gsm8k import SHOTS, final_number, prompt_for, read_problems
from common.evaluation.recall import VALUE_DIGITS, make_question

app = typer.Typer(no_args_is_help=True, help="Accuracy of a running system, over HTTP.")
Url = Annotated[str, typer.Option(help="the router's address")]


@app.command()
def recall(
    url: Url = "http://127.0.0.1:8000",
    n: Annotated[int, typer.Option(min=1, help="questions")] = 200,
    context: Annotated[int, typer.Option(help="characters of a prompt; for dsv4-nano tokens")] = 4000,
    concurrency: Annotated[int, typer.Option(min=1, help="questions at a time")] = 4,
    seed: Annotated[int, typer.Option(help="which questions")] = 0,
    gate: Annotated[float, typer.Option(help="exit status 1 below this accuracy")] = 0.0,
) -> None:
    """Key-value recall: an answer is right when all four digits are."""
    rng = random.Random(seed)  # noqa: S311 - questions, not secrets
    questions = [make_question(rng, context) for _ in range(n)]
    bodies = [{"prompt": q.prompt, "max_tokens": VALUE_DIGITS + 1, "temperature": 0, "stop": "\n"} for q in questions]
    right = _run("recall", url, bodies, concurrency, lambda i, text: text.strip() == questions[i].answer)
    if right.value < gate:
        raise typer.Exit(1)


@app.command()
def gsm8k(
    file: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="jsonl with question and answer a line")],
    url: Url = "http://127.0.0.1:8000",
    n: Annotated[int, typer.Option(min=1, help="questions at most")] = 1319,
    concurrency: Annotated[int, typer.Option(min=1, help="questions at a time")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer")] = 512,
) -> None:
    """GSM8K, five-shot: the file's first five problems are the examples, the rest is asked."""
    try:
        problems = read_problems(file)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--file") from None
    examples, asked = problems[:SHOTS], problems[SHOTS : SHOTS + n]
    bodies = [
        {"prompt": prompt_for(examples, p), "max_tokens": max_tokens, "temperature": 0, "stop": ["Question:", "\n\n"]}
        for p in asked
    ]
    _run("gsm8k", url, bodies, concurrency, lambda i, text: final_number(text) == final_number(asked[i].answer))


def _run(
    name: str, url: str, bodies: Sequence[dict[str, Any]], concurrency: int, is_right: Callable[[int, str], bool]
) -> Proportion:
    console = Console()
    right = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    begun = time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=len(bodies))

        def on_reply(index: int, reply: Reply) -> None:
            nonlocal right
            right += is_right(index, reply.text)
            progress.update(task, advance=1, description=f"{name} {right} right")

        try:
            replies = asyncio.run(ask_all(url, bodies, concurrency, on_reply))
        except (RuntimeError, OSError) as error:
            raise typer.BadParameter(str(error), param_hint="--url") from None
    seconds = time.monotonic() - begun
    result = Proportion(right, len(bodies))
    low, high = result.interval
    first = [reply.first_token_s * 1000 for reply in replies]
    console.print(f"{name}: {result.right}/{result.total} right, accuracy {result.value:.3f} [{low:.3f}, {high:.3f}]")
    console.print(
        f"TTFT ms: median {statistics.median(first):.0f}, mean {statistics.mean(first):.0f}, max {max(first):.0f}"
    )
    made = sum(reply.tokens for reply in replies)
    console.print(
        f"{made} tokens in {seconds:.1f} s: {made / seconds:.1f} tokens/s, {len(bodies) / seconds:.2f} requests/s"
    )
    return result
