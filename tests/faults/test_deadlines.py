"""Every wait of a handover has a deadline of its own; the one that passed is named and counted."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from common.errors import ErrorReason
from common.rpc.errors import from_rpc_error
from common.rpc.gen.dsv4pd.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.support.cluster import Cluster
from tests.support.processes import Service
from tests.system.test_pair import prompt

pytestmark = pytest.mark.system
DECODE = (
    "--host-pages", "40", "--logical-pages", "40", "--max-requests", "2", "--hot-entries", "64",
    "--queue-timeout-s", "0.4", "--prefill-queue-timeout-s", "0.5", "--prefill-timeout-s", "1.2",
    "--transfer-timeout-s", "0.3", "--cancel-timeout-s", "0.5",
)  # fmt: skip
# 150 kB/s: some 200 tokens are more than a transfer may take.
PREFILL = ("--transfer-bytes-per-s", "150000", "--transfer-run-bytes", "4096", "--kv-budget-tokens", "8000")


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(checkpoint, tmp_path_factory.mktemp("deadlines"), PREFILL, DECODE).start()
    yield made
    assert made.stop() == [0, 0]


@pytest.fixture
def quick(cluster: Cluster) -> Iterator[None]:
    """Lets the cluster ask a prefill whose link is as fast as it gets: then computing is what takes long."""
    flags = ("--model", str(cluster.model), "--kv-budget-tokens", "8000", "--threads", "1")
    slow, cluster.prefill = cluster.prefill, Service("prefill_service", cluster.folder, *flags, name="quick").start()
    yield
    quick, cluster.prefill = cluster.prefill, slow
    assert quick.stop() == 0


def passed(cluster: Cluster, which: str) -> float:
    return cluster.decode.status().counters.get(f"deadline_{which}", 0)


def fails(cluster: Cluster, request_id: str, tokens: list[int]) -> tuple[str, str]:
    """Field and message of the deadline that passed."""
    with pytest.raises(grpc.RpcError) as raised:
        cluster.generate(request_id, tokens, max_tokens=4)
    error = from_rpc_error(raised.value, ErrorReason.INTERNAL)  # type: ignore[arg-type]
    assert error.reason is ErrorReason.DEADLINE_EXCEEDED
    return error.field, error.message


def test_transfer(cluster: Cluster):
    before = passed(cluster, "transfer")
    field, message = fails(cluster, "transfer", prompt(500))
    assert field == "transfer_timeout_s"
    assert "within 0.3 s" in message
    assert passed(cluster, "transfer") == before + 1
    cluster.wait_idle(3)


@pytest.mark.usefixtures("quick")
def test_prefill(cluster: Cluster):
    before = passed(cluster, "prefill")
    field, message = fails(cluster, "prefill", prompt(7900))
    assert field == "prefill_timeout_s"
    assert message == "prefill deadline of 1.2 s passed"
    cluster.wait_idle(5)
    assert passed(cluster, "prefill") == before + 1


def test_reserve(cluster: Cluster):
    before = passed(cluster, "reserve")
    # Holds more than half of the pages while it is handed over.
    with grpc.insecure_channel(cluster.decode.address) as channel:
        holder = decode_pb2_grpc.DecodeStub(channel).Generate(
            decode_pb2.GenerateRequest(
                request_id="holder",
                prefill_address=cluster.prefill.address,
                token_ids=prompt(7000),
                sampling=common_pb2.SamplingParams(max_tokens=4),
            )
        )
        cluster.wait_phase(cluster.decode, "prefilling")
        field, message = fails(cluster, "reserve", prompt(4000))
        holder.cancel()
    assert field == "queue_timeout_s"
    assert "no memory came free within the queue's 0.4 s" in message
    assert passed(cluster, "reserve") == before + 1
    cluster.wait_idle(5)


@pytest.mark.usefixtures("quick")
def test_queue_and_its_time_counts_for_the_queue_alone(cluster: Cluster):
    # The first fills prefill's budget of tokens; the second waits for it there, not for memory.
    before = passed(cluster, "queue")
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(fails, cluster, "first", prompt(6000))
        cluster.wait_phase(cluster.prefill, "computing")
        field, message = fails(cluster, "second", prompt(3500))
        assert field == "queue_timeout_s"
        assert message == "queue deadline of 0.5 s passed"
        first.result()
    assert passed(cluster, "queue") == before + 1
    cluster.wait_idle(5)


def test_drain(cluster: Cluster):
    before = passed(cluster, "drain")
    with grpc.insecure_channel(cluster.decode.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(
            decode_pb2.GenerateRequest(
                request_id="drain",
                prefill_address=cluster.prefill.address,
                token_ids=prompt(300),
                sampling=common_pb2.SamplingParams(max_tokens=4),
            )
        )
        cluster.wait_phase(cluster.prefill, "sending")
        cluster.prefill.signal(signal.SIGSTOP)
        try:
            call.cancel()
            cluster.decode.wait_idle(5)
        finally:
            cluster.prefill.signal(signal.SIGCONT)
    assert passed(cluster, "drain") == before + 1
    cluster.wait_idle(5)


def test_a_message_that_is_late_is_ignored_and_counted(cluster: Cluster):
    before = cluster.prefill.status().counters.get("late_cancel", 0)
    with grpc.insecure_channel(cluster.prefill.address) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        reply = stub.Cancel(prefill_pb2.CancelRequest(key=common_pb2.RequestKey(request_id="nobody", generation=3)))
        assert reply.state == prefill_pb2.CancelReply.STATE_UNKNOWN
    assert cluster.prefill.status().counters["late_cancel"] == before + 1
