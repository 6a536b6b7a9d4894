"""The requests of `vllm bench serve`: its own reader of streams, without the server that it comes with."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from common.evaluation.recall import make_question
from tests.clients.environments import client_environment, run_client
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(1100)]
PROGRAM = Path(__file__).with_name("programs") / "vllm_calls.py"
# Of vllm the files alone, with what the one file needs: its dependencies are the server's.
REQUIREMENTS = (
    "--no-deps", "vllm==0.34.0", "regex==2026.12.2", "tqdm==4.70.1", "aiohttp==3.14.5", "aiohappyeyeballs==2.7.1",
    "aiosignal==1.4.0", "attrs==26.1.0", "frozenlist==1.8.0", "idna==3.21", "multidict==7.2.1", "propcache==0.5.4",
    "typing_extensions==4.16.0", "yarl==1.25.1",
)  # fmt: skip


def test_its_streams_are_read_whole_timed_and_counted(cluster: Cluster, tmp_path: Path):
    bin_directory = client_environment("vllm", REQUIREMENTS)
    question = make_question(random.Random(12), 600)
    found: dict[str, Any] = json.loads(
        run_client([bin_directory / "python", PROGRAM, cluster.url, question.prompt], tmp_path)
    )
    for kind in ("completions", "chat"):
        for output in found[kind]:
            assert (output["success"], output["error"]) == (True, "")
            assert output["generated_text"] == question.answer
            # Four digits and the newline that ended them.
            assert output["output_tokens"] == 5
        whole = found[f"{kind}_to_the_length"]
        assert (whole["success"], whole["output_tokens"]) == (True, 20)
        assert whole["generated_text"].startswith(question.answer)
        assert 0 < whole["ttft"] <= whole["latency"]
        assert sum(whole["itl"]) == pytest.approx(whole["latency"] - whole["ttft"])
        refused = found[f"{kind}_refused"]
        assert (refused["success"], refused["error"], refused["generated_text"]) == (False, "Bad Request", "")
    assert {output["prompt_len"] for output in found["completions"]} == {len(question.prompt)}
