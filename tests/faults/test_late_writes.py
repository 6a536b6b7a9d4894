"""Bytes that a stopped prefill had sent arrive when its pages are another request's: they must change nothing.

The link from prefill is so slow that megabytes of an aborted handover wait in its host's socket buffers, from where they
come on by themselves while the process stands still. The next request takes the very same pages.
"""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from common.model.model import DeepSeekV4Model
from common.rpc.gen.dsv4pd.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tests.support.cluster import Cluster
from tests.support.monolithic import generate
from tests.support.namespaces import Hosts, why_not
from tests.support.processes import Service
from tests.system.test_pair import prompt

REASON = why_not()
pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]
STUCK, VICTIM, OUTPUT = 6000, 5000, 150


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts("late", ("prefill", "decode")) as made:
        yield made


@pytest.fixture
def cluster(hosts: Hosts, checkpoint: Path, tmp_path: Path) -> Iterator[tuple[Cluster, Service]]:
    made = Cluster(checkpoint, tmp_path)

    def start(package: str, host: str, name: str, *flags: str) -> Service:
        address = hosts.address(host)
        where = ("--model", str(checkpoint), "--threads", "1", "--host", address, "--transfer-hostname", address)
        return Service(package, tmp_path, *where, *flags, name=name, prefix=hosts.inside(host)).start()

    ring = ("--send-ring-bytes", str(32 << 20))
    made.prefill = start("prefill_service", "prefill", "sleeper", *ring, "--drain-timeout-s", "3")
    near = start("prefill_service", "decode", "near", *ring)
    # Pages in order: the victim gets those of the request before it.
    pools = ("--host-pages", "32", "--logical-pages", "32", "--max-requests", "4", "--hot-entries", "64")
    made.decode = start("decode_service", "decode", "decode", *pools, "--cancel-timeout-s", "0.5")
    yield made, near
    assert near.stop() == 0
    assert made.stop() == [0, 0]


def test_what_was_sent_before_a_stop_never_reaches_the_next_owner_of_the_pages(
    hosts: Hosts, cluster: tuple[Cluster, Service], model: DeepSeekV4Model
):
    pair, near = cluster
    expected = generate(model, prompt(VICTIM, 3), OUTPUT, chunk_tokens=512, stop_at_eos=False)
    hosts.slow("prefill", "2mbit")
    with grpc.insecure_channel(pair.decode.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(
            decode_pb2.GenerateRequest(
                request_id="stuck",
                prefill_address=pair.prefill.address,
                token_ids=prompt(STUCK),
                sampling=common_pb2.SamplingParams(max_tokens=4),
            )
        )
        pair.wait_phase(pair.decode, "prefilling")
        # Several chunks are computed, and posted, of which the link has taken but the first.
        time.sleep(2.0)
        pair.prefill.signal(signal.SIGSTOP)
        call.cancel()
    pair.decode.wait_idle(5)
    with ThreadPoolExecutor(1) as threads:
        victim = threads.submit(pair.generate_from, near.address, "victim", prompt(VICTIM, 3), OUTPUT)
        pair.wait_phase(pair.decode, "running")
        hosts.heal()
        pair.prefill.signal(signal.SIGCONT)
        assert victim.result(60) == expected
    pair.wait_idle(10)
    assert pair.decode.status().counters["fences"] == 1
