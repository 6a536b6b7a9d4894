"""The decode service under readers that do not read, queues that are full and a prefill service that stands still."""

import asyncio
import signal
import time
from collections.abc import Iterator
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
from tests.system.test_pair import prompt

pytestmark = pytest.mark.system
SLOW_TRANSFER = ("--transfer-run-bytes", "1024", "--transfer-batch-runs", "1")
DECODE = (
    "--max-requests", "2", "--max-queued", "1", "--hot-entries", "64", "--cancel-timeout-s", "0.3",
    "--quarantine-timeout-s", "60",
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


def test_pages_of_a_prefill_that_stands_still_are_set_aside_until_it_answers(cluster: Cluster, model: DeepSeekV4Model):
    with grpc.insecure_channel(cluster.decode.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(message(cluster, "stuck", prompt(2000)))
        cluster.wait_phase(cluster.prefill, "sending")
        cluster.prefill.signal(signal.SIGSTOP)
        try:
            call.cancel()
            end = time.monotonic() + 5
            while time.monotonic() < end:
                pools = {pool.name: pool for pool in cluster.decode.status().pools}
                if pools["host_c4"].quarantined:
                    break
                time.sleep(0.02)
            assert pools["host_c4"].quarantined == 8
            assert pools["host_c4"].used == 0
            assert all(pools[name].quarantined == 1 for name in ("window", "state", "hot"))
            assert cluster.phase(cluster.decode, "draining") == 1
            # It may wake up and write at any time: nothing of it is given to others while it stands.
            time.sleep(1.0)
            assert cluster.phase(cluster.decode, "draining") == 1
        finally:
            cluster.prefill.signal(signal.SIGCONT)
    cluster.wait_idle(5.0)
    expected = generate(model, prompt(600), 8, chunk_tokens=512, stop_at_eos=False)
    assert cluster.generate("after", prompt(600), 8).tokens == expected


def test_quarantine_ends_with_the_writers_process(cluster: Cluster, model: DeepSeekV4Model):
    with grpc.insecure_channel(cluster.decode.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(message(cluster, "doomed", prompt(2000)))
        cluster.wait_phase(cluster.prefill, "sending")
        cluster.prefill.signal(signal.SIGSTOP)
        call.cancel()
        cluster.wait_phase(cluster.decode, "draining")
        port = int(cluster.prefill.address.rpartition(":")[2])
        cluster.prefill.kill()
    cluster.decode.wait_idle(3.0)
    cluster.prefill.start(port)
    expected = generate(model, prompt(400), 8, chunk_tokens=512, stop_at_eos=False)
    assert cluster.generate("again", prompt(400), 8).tokens == expected
    cluster.wait_idle(1.0)
