"""Prefill and decode on two hosts (network namespaces): the link is slowed, cut, or cut one way. Errors are bounded in
time, nothing leaks, and after the link is back everything goes on by itself."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from common.model.model import DeepSeekV4Model
from tests.support.cluster import Cluster
from tests.support.monolithic import generate
from tests.support.namespaces import Hosts, why_not
from tests.support.processes import Service
from tests.system.test_pair import prompt

REASON = why_not()
pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]
# A stream lasts at most 2 + 4 + 2 seconds of silence, a Cancel 2; then the session is fenced.
DECODE = (
    "--prefill-queue-timeout-s", "2", "--prefill-timeout-s", "4", "--transfer-timeout-s", "3", "--cancel-timeout-s", "1",
    "--handshake-timeout-s", "2", "--hot-entries", "64",
)  # fmt: skip
BOUND_S = 12.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts("part", ("prefill", "decode")) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: Hosts, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(checkpoint, tmp_path_factory.mktemp("partition"))
    flags = ("--model", str(checkpoint), "--threads", "1")

    def start(package: str, host: str, *more: str) -> Service:
        address = hosts.address(host)
        where = ("--host", address, "--transfer-hostname", address)
        return Service(package, made.folder, *flags, *where, *more, prefix=hosts.inside(host)).start()

    slow = ("--transfer-run-bytes", "16384", "--transfer-batch-runs", "2", "--drain-timeout-s", "3")
    made.prefill = start("prefill_service", "prefill", "--send-ring-bytes", str(32 << 20), *slow)
    pools = ("--host-pages", "64", "--logical-pages", "64", "--max-requests", "6")
    made.decode = start("decode_service", "decode", *pools, *DECODE)
    yield made
    assert made.stop() == [0, 0]


@pytest.fixture(autouse=True)
def _healed(hosts: Hosts) -> Iterator[None]:
    yield
    hosts.heal()


def wait_until_served(cluster: Cluster, model: DeepSeekV4Model, timeout_s: float = 20.0) -> None:
    """After a repair: the same text as ever, without anybody restarting anything."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            answer = cluster.generate(f"again-{time.time_ns()}", prompt(300), 8)
        except grpc.RpcError:
            assert time.monotonic() < end
            time.sleep(0.3)
            continue
        assert answer.tokens == generate(model, prompt(300), 8, chunk_tokens=512, stop_at_eos=False)
        return


def test_a_slow_link_changes_nothing_but_time(hosts: Hosts, cluster: Cluster, model: DeepSeekV4Model):
    hosts.slow("prefill", "20mbit")
    assert cluster.generate("slow", prompt(500), 8).tokens == generate(
        model, prompt(500), 8, chunk_tokens=512, stop_at_eos=False
    )
    cluster.wait_idle(3)


@pytest.mark.parametrize(
    ("to_it", "from_it"), [(True, True), (False, True), (True, False)], ids=["both ways", "from prefill", "to prefill"]
)
def test_a_cut_link_is_a_bounded_error_and_heals(
    hosts: Hosts, cluster: Cluster, model: DeepSeekV4Model, to_it: bool, from_it: bool
):
    wait_until_served(cluster, model)
    fences = cluster.decode.status().counters["fences"]
    hosts.slow("prefill", "8mbit")

    def cut() -> None:
        cluster.wait_phase(cluster.decode, "prefilling")
        time.sleep(0.6)
        hosts.cut("prefill", to_it=to_it, from_it=from_it)

    cutter = threading.Thread(target=cut)
    cutter.start()
    begun = time.monotonic()
    with pytest.raises(grpc.RpcError) as raised:
        cluster.generate(f"cut-{to_it}-{from_it}", prompt(3000), 8)
    assert raised.value.code() in (
        grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL,
    )  # fmt: skip
    assert time.monotonic() - begun < BOUND_S
    cutter.join()
    # While the link is still cut: every page is free, its session fenced.
    cluster.decode.wait_idle(6)
    status = cluster.decode.status(check_integrity=True)
    assert status.counters["quarantine_alarm"] == 0
    assert status.counters["fences"] > fences
    # A request now ends soon too.
    begun = time.monotonic()
    with pytest.raises(grpc.RpcError):
        cluster.generate(f"dark-{to_it}-{from_it}", prompt(50), 8)
    assert time.monotonic() - begun < BOUND_S
    hosts.heal()
    wait_until_served(cluster, model)
    cluster.prefill.wait_idle(40)
    cluster.decode.wait_idle(5)
