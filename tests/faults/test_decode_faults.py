"""The decode service under readers that do not read, queues that are full and a prefill service that stands still."""

import asyncio
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import ErrorReason
from common.model.model import DeepSeekV4Model
from common.rpc.errors import from_rpc_error
from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc, common_pb2, decode_pb2, decode_pb2_grpc
from tests.support.cluster import Cluster
from tests.support.monolithic import generate
from tests.support.processes import Service
from tests.system.test_pair import prompt

pytestmark = pytest.mark.system
SLOW_TRANSFER = ("--transfer-run-bytes", "1024", "--transfer-batch-runs", "1")
DECODE = (
    "--max-requests", "2", "--max-queued", "1", "--hot-entries", "64", "--cancel-timeout-s", "0.3",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(checkpoint, tmp_path_factory.mktemp("decode-faults"), SLOW_TRANSFER, DECODE).start()
    yield made
    assert made.stop() == [0, 0]


def message(
    cluster: Cluster, request_id: str, tokens: list[int], logprobs: int | None = None, **fields: float
) -> decode_pb2.GenerateRequest:
    max_tokens = int(fields.pop("max_tokens", 8))
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
    return decode_pb2.GenerateRequest(
        request_id=request_id, prefill_address=cluster.prefill.address, token_ids=tokens, sampling=sampling, **fields
    )


def made_tokens(cluster: Cluster) -> int:
    with grpc.insecure_channel(cluster.decode.address) as channel:
        found = admin_pb2_grpc.AdminStub(channel).ListRequests(admin_pb2.ListRequestsRequest(), timeout=5)
    return sum(request.generated_tokens for request in found.requests)


async def test_a_reader_that_never_reads_holds_up_nobody_and_may_leave(cluster: Cluster, model: DeepSeekV4Model):
    # Windows as small as they get and messages of half a kilobyte: the service's writes soon stand still.
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(cluster.decode.address, options=options) as channel:
        stub = decode_pb2_grpc.DecodeStub(channel)
        deaf = stub.Generate(message(cluster, "deaf", prompt(30), logprobs=20, max_tokens=20_000))
        await deaf.read()
        expected = generate(model, prompt(90), 12, chunk_tokens=512, stop_at_eos=False)
        begun = time.monotonic()
        answer = await asyncio.to_thread(cluster.generate, "swift", prompt(90), 12)
        assert answer.tokens == expected
        assert time.monotonic() - begun < 5
        end = time.monotonic() + 20
        while (made := await asyncio.to_thread(made_tokens, cluster)) < 400:
            assert time.monotonic() < end, f"the reader holds decoding up at {made} tokens"
            await asyncio.sleep(0.05)
        deaf.cancel()
    await asyncio.to_thread(cluster.wait_idle, 1.0)


def test_a_full_queue_and_a_wait_that_is_too_long_are_typed_errors(cluster: Cluster):
    with grpc.insecure_channel(cluster.decode.address) as channel:
        stub = decode_pb2_grpc.DecodeStub(channel)
        running: list[Any] = []
        for i in range(2):
            running.append(stub.Generate(message(cluster, f"long-{i}", prompt(20 + i), max_tokens=20_000)))
            next(running[-1])
        waiting = stub.Generate(message(cluster, "waits", prompt(10), queue_timeout_s=1.0))
        cluster.wait_phase(cluster.decode, "queued")
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(message(cluster, "refused", prompt(10))))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(refused.value, ErrorReason.INTERNAL)
        assert error.reason is ErrorReason.QUEUE_FULL
        assert error.retry_after_s > 0
        with pytest.raises(grpc.RpcError) as late:
            list(waiting)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "within the queue's 1 s" in late.value.details()
        for call in running:
            call.cancel()
    cluster.wait_idle(1.0)


def test_a_prefill_that_stands_still_is_fenced_and_its_late_writes_go_nowhere(cluster: Cluster, model: DeepSeekV4Model):
    tokens = prompt(700)
    expected = generate(model, tokens, 200, chunk_tokens=512, stop_at_eos=False)
    other = Service("prefill_service", cluster.folder, "--model", str(cluster.model), "--send-ring-bytes", str(32 << 20), name="other").start()  # fmt: skip
    with grpc.insecure_channel(cluster.decode.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(message(cluster, "stuck", prompt(2000)))
        cluster.wait_phase(cluster.prefill, "sending")
        cluster.prefill.signal(signal.SIGSTOP)
        mine = cluster.prefill
        try:
            fences = cluster.decode.status().counters["fences"]
            call.cancel()
            # No waiting for it to come back: its session ends, and then its pages are anybody's.
            cluster.decode.wait_idle(3.0)
            status = cluster.decode.status()
            assert status.counters["fences"] == fences + 1
            assert status.counters["quarantine_alarm"] == 0
            # The same pages for another request by another prefill, which is decoding when the sleeper wakes up.
            cluster.prefill = other
            with ThreadPoolExecutor(1) as threads:
                victim = threads.submit(cluster.generate, "victim", tokens, 200)
                cluster.wait_phase(cluster.decode, "running")
                mine.signal(signal.SIGCONT)
                assert victim.result(60).tokens == expected
        finally:
            cluster.prefill = mine
            cluster.prefill.signal(signal.SIGCONT)
            assert other.stop() == 0
    cluster.wait_idle(5.0)
    assert cluster.generate("after", prompt(600), 8).tokens == generate(
        model, prompt(600), 8, chunk_tokens=512, stop_at_eos=False
    )


def test_quarantine_ends_with_the_writers_process(cluster: Cluster, model: DeepSeekV4Model):
    with grpc.insecure_channel(cluster.decode.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(message(cluster, "doomed", prompt(2000)))
        cluster.wait_phase(cluster.prefill, "sending")
        cluster.prefill.signal(signal.SIGSTOP)
        call.cancel()
        port = int(cluster.prefill.address.rpartition(":")[2])
        cluster.prefill.kill()
    cluster.decode.wait_idle(3.0)
    cluster.prefill.start(port)
    expected = generate(model, prompt(400), 8, chunk_tokens=512, stop_at_eos=False)
    assert cluster.generate("again", prompt(400), 8).tokens == expected
    cluster.wait_idle(1.0)


@pytest.mark.slow
def test_writes_that_fail_half_way_are_fenced_although_prefill_drained(cluster: Cluster, model: DeepSeekV4Model):
    """Decode stands still until prefill's writes fail. What they had sent waits in decode's own socket buffers and
    would land when decode goes on, after its pages went to somebody else."""
    fences = cluster.decode.status().counters["fences"]
    with grpc.insecure_channel(cluster.decode.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(message(cluster, "half-way", prompt(2500)))
        cluster.wait_phase(cluster.prefill, "sending")
        cluster.decode.signal(signal.SIGSTOP)
        end = time.monotonic() + 40
        while cluster.phase(cluster.prefill, "sending"):
            assert time.monotonic() < end, "the writes never failed"
            time.sleep(0.2)
        cluster.decode.signal(signal.SIGCONT)
        with pytest.raises(grpc.RpcError):
            list(call)
    cluster.wait_idle(10)
    assert cluster.decode.status().counters["fences"] > fences
    expected = generate(model, prompt(600), 8, chunk_tokens=512, stop_at_eos=False)
    assert cluster.generate("after-half", prompt(600), 8).tokens == expected
