"""A decode service sized by bytes: it starts inside its budgets, says what fits, serves that, and refuses the rest."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.model.model import DeepSeekV4Model
from tests.support.cluster import Cluster
from tests.support.monolithic import generate
from tests.support.processes import Service
from tests.system.test_pair import prompt

pytestmark = pytest.mark.system
HOST, DEVICE = 2_000_000, 12 << 20


def sized(service: Service) -> dict[str, Any]:
    """What start-up said of its pools."""
    lines = [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
    (found,) = [line for line in lines if line["event"] == "pools sized"]
    return found


def test_a_small_budget_serves_what_start_up_says_and_no_more(checkpoint: Path, tmp_path: Path, model: DeepSeekV4Model):
    common = ("--model", str(checkpoint), "--threads", "1")
    cluster = Cluster(checkpoint, tmp_path)
    cluster.prefill = Service("prefill_service", tmp_path, *common, "--send-ring-bytes", str(32 << 20)).launch()
    budgets = ("--host-kv-budget", "2MB", "--device-kv-budget", "12MiB", "--hot-entries", "64")
    cluster.decode = Service("decode_service", tmp_path, *common, *budgets).launch()
    cluster.prefill.wait_ready()
    cluster.decode.wait_ready()
    told = sized(cluster.decode)
    pools = {pool.name: pool for pool in cluster.decode.status().pools}
    host = pools["host_c4"]
    assert host.total * host.item_bytes <= HOST < (host.total + 1) * host.item_bytes
    on_device = sum(p.total * p.item_bytes for name, p in pools.items() if name not in ("host_c4", "staging"))
    assert on_device <= DEVICE
    assert told["host_pages"] == host.total
    (longest,) = told["fits"]
    assert longest["requests"] == 1
    assert longest["tokens"] == min(host.total, pools["logical"].total) * 256
    # The longest request that is said to fit is served, alone and with a short one behind it; a longer one never is.
    length = longest["tokens"] - 6
    answers = cluster.generate_together([prompt(length), prompt(3)], max_tokens=6)
    for asked, answer in zip((length, 3), answers, strict=True):
        assert answer.tokens == generate(model, prompt(asked), 6, chunk_tokens=512, stop_at_eos=False), asked
    with pytest.raises(grpc.RpcError):
        cluster.generate("long", prompt(longest["tokens"]), max_tokens=6)
    cluster.wait_idle(2)
    assert cluster.stop() == [0, 0]


def refusal(*flags: str, memlock: int | None = None) -> str:
    """How a decode service that can't start says so; it must end by itself, with status 1."""

    def limit() -> None:
        if memlock is not None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))

    done = subprocess.run(
        [sys.executable, "-m", "decode_service", "--port", "0", "--threads", "1", *flags],
        capture_output=True, text=True, timeout=120, check=False, preexec_fn=limit,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return str(json.loads(done.stderr.splitlines()[-1])["detail"])


def test_a_budget_too_small_for_one_request_is_refused_and_the_number_it_names_suffices(
    checkpoint: Path, tmp_path: Path
):
    model = ("--model", str(checkpoint))
    message = refusal(*model, "--device-kv-budget", "1MiB")
    needed = re.search(r"device_kv_budget = 1048576 bytes .* is too small: .* take (\d+) bytes", message)
    assert needed is not None, message
    budgets = ("--device-kv-budget", needed[1], "--host-kv-budget", "1MiB")
    service = Service("decode_service", tmp_path, *model, *budgets).start()
    told = sized(service)
    assert (told["max_requests"], told["logical_pages"], told["fits"][-1]["tokens"]) == (1, 1, 256)
    assert service.stop() == 0


def test_a_memlock_limit_is_named_before_any_device_is_looked_for(checkpoint: Path):
    flags = (
        "--model",
        str(checkpoint),
        "--transfer-protocol",
        "rdma",
        "--host-kv-budget",
        "50MB",
        "--device-kv-budget",
        "50MB",
    )
    message = refusal(*flags, memlock=8 << 20)
    assert re.search(r"RDMA locks \d+ bytes, this process may lock 8388608: set `ulimit -l unlimited`", message)
