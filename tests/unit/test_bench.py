"""Load, percentiles and figures: by arithmetic, and against a served router with scripted workers."""

import asyncio
import json
import math
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from common.bench.load import Load, Sample, pool_pages, run_load
from common.bench.report import Objective, percentile, summarise
from common.cli.bench import make_bodies
from common.cli.main import app
from tests.unit.router.conftest import ServeRouter, serve_router  # noqa: F401 - a fixture
from tests.unit.router.scripted_worker import ScriptedWorker


def sample(ttft_s: float, gaps_s: tuple[float, ...] = (), error: str = "", begun_s: float = 0.0) -> Sample:
    return Sample(begun_s, ttft_s, gaps_s, ttft_s + sum(gaps_s), len(gaps_s) + 1, error)


def test_percentiles_are_nearest_ranks():
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([7.0], 1) == 7
    assert math.isnan(percentile([], 50))


def test_arrivals_follow_the_seed_and_the_rate():
    arrivals = Load("open", 20.0, 4000, 3).arrivals()
    assert arrivals == Load("open", 20.0, 4000, 3).arrivals() != Load("open", 20.0, 4000, 4).arrivals()
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(200, rel=0.1)
    assert Load("closed", 3, 5).arrivals() == [0.0] * 5


def test_goodput_counts_what_met_the_objective():
    samples = [sample(0.1, (0.01, 0.03)), sample(0.3, (0.01,)), sample(0.1, (0.2,)), sample(0.0, error="HTTP 429")]
    found = summarise(Load("open", 2.0, 4), samples, Objective(200, 50))
    assert (found.requests, found.failed, found.good_share) == (4, 1, 0.25)
    assert found.ttft_ms["p50"] == pytest.approx(100)
    assert found.gap_ms["p99"] == pytest.approx(200)
    assert found.seconds == pytest.approx(0.31)
    assert found.tokens_per_s == pytest.approx(7 / 0.31)
    assert found.errors == ("HTTP 429",)
    assert summarise(Load("open", 2.0, 4), samples, Objective()).good_share == 0.75
    empty = summarise(Load("closed", 1, 0), [], Objective())
    assert (empty.requests, empty.tokens_per_s, empty.good_share) == (0, 0.0, 0.0)


def test_occupancy_is_read_from_metrics():
    text = """# HELP dsv4pd_decode_pool_pages Pages by pool and state.
dsv4pd_decode_pool_pages{pool="host_c4",state="free"} 4.0
dsv4pd_decode_pool_pages{pool="host_c4",state="used"} 12.0
dsv4pd_decode_pool_pages{pool="hot",state="used"} 3.0
"""
    assert pool_pages(text) == [("host_c4", 12.0), ("hot", 3.0)]


def test_prompts_differ_and_repeat_by_seed():
    bodies = make_bodies(3, 50, 4, 1)
    assert bodies == make_bodies(3, 50, 4, 1) != make_bodies(3, 50, 4, 2)
    assert len({tuple(body["prompt"]) for body in bodies}) == 3
    assert all(4 <= token < 260 for body in bodies for token in body["prompt"])


async def test_a_load_is_measured_request_by_request(serve_router: ServeRouter):  # noqa: F811
    router = await serve_router([ScriptedWorker()])
    seen: list[Sample] = []
    load = Load("closed", 2, 6)
    samples = await run_load(router.url, load, make_bodies(6, 20, 4, 0), {}, seen.append)
    assert len(samples) == len(seen) == 6
    assert all(s.error == "" and s.tokens > 0 and 0 < s.ttft_s <= s.total_s for s in samples)
    bad = [{"prompt": [5], "max_tokens": 0}, *make_bodies(1, 5, 2, 0)]
    refused, good = await run_load(router.url, Load("open", 50.0, 2), bad, {}, seen.append)
    assert refused.error.startswith("HTTP 400")
    assert good.error == ""
    (gone,) = await run_load("http://127.0.0.1:9", Load("closed", 1, 1), make_bodies(1, 5, 2, 0), {}, seen.append)
    assert "Connect" in gone.error


async def bench_run(*flags: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["bench", "run", *flags])


async def test_a_run_is_saved_and_no_prompt_is_sent_twice(serve_router: ServeRouter, tmp_path: Path):  # noqa: F811
    worker = ScriptedWorker()
    router = await serve_router([worker])
    flags = ["--url", router.url, "--requests", "3", "--prompt-tokens", "20", "--max-tokens", "4"]
    done = await bench_run(*flags, "--concurrency", "1", "--concurrency", "2", "--json", str(tmp_path / "run.json"))
    assert done.exit_code == 0, done.output
    run = json.loads((tmp_path / "run.json").read_text())
    assert [(point["kind"], point["level"], point["failed"]) for point in run["points"]] == [
        ("closed", 1, 0),
        ("closed", 2, 0),
    ]
    assert all(point["total_ms"]["p99"] > 0 and point["good_share"] == 1 for point in run["points"])
    assert len({tuple(request.token_ids) for request in worker.requests}) == 6
    strict = await bench_run(*flags, "--slo-total-ms", "0.0001", "--json", str(tmp_path / "strict.json"))
    assert strict.exit_code == 0, strict.output
    assert json.loads((tmp_path / "strict.json").read_text())["points"][0]["good_share"] == 0


async def test_a_run_in_which_all_failed_is_saved_as_strict_json(serve_router: ServeRouter, tmp_path: Path):  # noqa: F811
    pytest.importorskip("matplotlib")
    router = await serve_router([ScriptedWorker()])
    target, figure = tmp_path / "run.json", tmp_path / "run.png"
    done = await bench_run(
        "--url", router.url, "--requests", "2", "--max-tokens", "99999999", "--json", str(target), "--figure", str(figure)
    )  # fmt: skip
    assert done.exit_code == 1, done.output

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    (point,) = json.loads(target.read_text(), parse_constant=refuse)["points"]
    assert (point["failed"], point["ttft_ms"]["p50"], point["goodput_per_s"]) == (2, None, 0)
    assert figure.read_bytes()[:4] == b"\x89PNG"


def saved(path: Path, factor: float) -> Path:
    points = [
        json.loads(
            json.dumps(vars(summarise(Load("open", level, 4), [sample(0.1 * factor, (0.01,))] * 4, Objective())))
        )
        for level in (1.0, 2.0)
    ]
    path.write_text(json.dumps({"points": points, "occupancy": [[0.0, [["host_c4", 1.0]]], [0.5, [["host_c4", 2.0]]]]}))
    return path


def test_saved_runs_are_drawn_into_one_figure(tmp_path: Path):
    pytest.importorskip("matplotlib")
    runs = [saved(tmp_path / f"{name}.json", factor) for name, factor in (("direct", 1.0), ("staged", 1.2))]
    done = CliRunner().invoke(app, ["bench", "compare", *map(str, runs), "--figure", str(tmp_path / "f.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "none.json").write_text("{}")
    done = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "none.json")])
    assert done.exit_code == 2
    assert "not a saved run" in done.output


def test_an_address_where_nobody_is_is_refused():
    done = CliRunner().invoke(app, ["bench", "run", "--url", "http://127.0.0.1:9", "--requests", "1"])
    assert done.exit_code == 2
    assert "--url" in done.output
