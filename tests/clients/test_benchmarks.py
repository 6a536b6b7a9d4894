"""Benchmark clients: guidellm and aiperf stream from the router, count what came and report no error."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import NANO
from tests.clients.environments import client_environment, run_client
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(1100)]
REQUESTS = 6


def test_guidellm_counts_every_request_as_successful(cluster: Cluster, tmp_path: Path):
    bin_directory = client_environment("guidellm", ["guidellm==0.8.1"])
    run_client(
        [
            bin_directory / "guidellm", "run", "--backend", f"kind=openai_http,target={cluster.url},model=dsv4-nano",
            "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=hf_auto,model={NANO}",
            "--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=10",
            "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-progress",
        ],
        tmp_path,
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf_finishes_without_an_error(cluster: Cluster, tmp_path: Path, kind: str):
    bin_directory = client_environment("aiperf", ["aiperf==0.13.0"])
    run_client(
        [
            bin_directory / "aiperf", "profile", "-m", "dsv4-nano", "--url", cluster.url, "--endpoint-type", kind,
            "--streaming", "--tokenizer", NANO, "--request-count", str(REQUESTS), "--concurrency", "2",
            "--synthetic-input-tokens-mean", "100", "--output-tokens-mean", "10", "--ui", "none",
            "--artifact-dir", tmp_path / "out",
        ],
        tmp_path,
        # Offline it takes a tokenizer's folder for a name on the hub.
        HF_HUB_OFFLINE="",
    )  # fmt: skip
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_request_count")
