"""Clients that leave and processes that die, in every phase: others answer, nothing leaks, the text stays right."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from common.model.model import DeepSeekV4Model
from tests.support.cluster import Cluster
from tests.support.monolithic import generate
from tests.system.test_pair import prompt

pytestmark = pytest.mark.system
# Writes so small that a handover lasts: what is in flight can be interrupted.
SLOW_TRANSFER = ("--transfer-run-bytes", "1024", "--transfer-batch-runs", "1")
LIMIT_S = 1.0


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(
        checkpoint, tmp_path_factory.mktemp("faults"), SLOW_TRANSFER, ("--max-requests", "2", "--hot-entries", "64"), with_router=True
    ).start()  # fmt: skip
    yield made
    assert made.stop() == [0, 0, 0]


class Caller:
    """One HTTP completion on a thread; `leave` closes its connection."""

    def __init__(self, cluster: Cluster, tokens: list[int], stream: bool = True, **body: object) -> None:
        self.client = httpx.Client(timeout=60)
        self.body = {"prompt": tokens, "stream": stream, "max_tokens": 400, "ignore_eos": True, "temperature": 0} | body
        self.url = f"{cluster.url}/v1/completions"
        self.lines: list[str] = []
        self.status = 0
        self.error: Exception | None = None
        self.first_line = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with self.client.stream("POST", self.url, json=self.body) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    self.lines.append(line)
                    self.first_line.set()
        except Exception as error:  # noqa: BLE001 - what a closed connection raises varies
            self.error = error
        self.first_line.set()

    def leave(self) -> None:
        # The socket is closed under the reading thread, as a client that dies would.
        for connection in self.client._transport._pool.connections:  # type: ignore[attr-defined]
            stream = connection._connection._network_stream  # type: ignore[attr-defined]
            stream.get_extra_info("socket").shutdown(2)
        self.thread.join(5)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_while_decoding(cluster: Cluster, stream: bool):
    caller = Caller(cluster, prompt(40), stream)
    cluster.wait_phase(cluster.decode, "running")
    caller.leave()
    cluster.wait_idle(LIMIT_S)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_while_prefilling(cluster: Cluster, stream: bool):
    caller = Caller(cluster, prompt(6000), stream)
    cluster.wait_phase(cluster.prefill, "computing")
    caller.leave()
    cluster.wait_idle(LIMIT_S)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_while_transferring(cluster: Cluster, stream: bool):
    caller = Caller(cluster, prompt(1000), stream)
    cluster.wait_phase(cluster.prefill, "sending")
    caller.leave()
    cluster.wait_idle(LIMIT_S)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_while_queued(cluster: Cluster, stream: bool):
    running = [Caller(cluster, prompt(20 + i), max_tokens=3000) for i in range(2)]
    for caller in running:
        caller.first_line.wait(10)
    queued = Caller(cluster, prompt(50), stream)
    cluster.wait_phase(cluster.decode, "queued")
    queued.leave()
    begun = time.monotonic()
    while cluster.phase(cluster.decode, "queued"):
        assert time.monotonic() - begun < LIMIT_S
        time.sleep(0.01)
    for caller in running:
        caller.leave()
    cluster.wait_idle(LIMIT_S)


def test_prefill_killed_mid_transfer(cluster: Cluster, model: DeepSeekV4Model):
    bystander = Caller(cluster, prompt(33), max_tokens=300, return_token_ids=True)
    bystander.first_line.wait(10)
    victim = Caller(cluster, prompt(1500), stream=False)
    cluster.wait_phase(cluster.prefill, "sending")
    port = int(cluster.prefill.address.rpartition(":")[2])
    killed = time.monotonic()
    cluster.prefill.kill()
    victim.thread.join(5)
    assert time.monotonic() - killed < LIMIT_S
    assert victim.status == 503
    assert "prefill" in "".join(victim.lines)
    # Decode goes on; new requests are told that there is nobody, and find the restarted process by themselves.
    answer = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": [5], "max_tokens": 2})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    incarnation = cluster.decode.status().incarnation.id
    # Asked over and over, decode's connection to the dead service backs off; the restarted one is used at once.
    for attempt in range(3):
        with pytest.raises(grpc.RpcError) as raised:
            cluster.generate(f"nobody-{attempt}", [5], max_tokens=2)
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    cluster.prefill.start(port)
    cluster.wait_http_ready()
    text = httpx.post(
        f"{cluster.url}/v1/completions", json={"prompt": prompt(300), "max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True}, timeout=30
    ).json()["choices"][0]["token_ids"]  # fmt: skip
    assert text == generate(model, prompt(300), 8, chunk_tokens=512, stop_at_eos=False)
    bystander.thread.join(30)
    assert bystander.error is None
    assert bystander.lines[-2] == "data: [DONE]"
    import json

    made = [
        t
        for line in bystander.lines
        if line.startswith("data: {")
        for c in json.loads(line[6:])["choices"]
        for t in c["token_ids"]
    ]
    assert made == generate(model, prompt(33), 300, chunk_tokens=512, stop_at_eos=False)
    cluster.wait_idle(2)
    assert cluster.decode.status().incarnation.id == incarnation


@pytest.mark.parametrize("phase", ["sending", "running"])
def test_decode_killed(cluster: Cluster, model: DeepSeekV4Model, phase: str):
    victim = Caller(cluster, prompt(1000), max_tokens=400)
    cluster.wait_phase(cluster.prefill if phase == "sending" else cluster.decode, phase)
    port = int(cluster.decode.address.rpartition(":")[2])
    incarnation = cluster.prefill.status(check_integrity=False).incarnation.id
    killed = time.monotonic()
    cluster.decode.kill()
    victim.thread.join(5)
    assert time.monotonic() - killed < LIMIT_S
    if phase == "sending":
        assert victim.status in (502, 503)
    else:
        assert '"error"' in "".join(victim.lines)
        assert victim.lines[-2] == "data: [DONE]"
    cluster.prefill.wait_idle(LIMIT_S)
    cluster.decode.start(port)
    cluster.wait_http_ready()
    assert cluster.generate("after", prompt(130), max_tokens=6).tokens == generate(
        model, prompt(130), 6, chunk_tokens=512, stop_at_eos=False
    )
    cluster.wait_idle(2)
    assert cluster.prefill.status(check_integrity=False).incarnation.id == incarnation


def test_abort_by_an_operator(cluster: Cluster):
    from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc

    caller = Caller(cluster, prompt(60), max_tokens=3000)
    cluster.wait_phase(cluster.decode, "running")
    with grpc.insecure_channel(cluster.decode.address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        (found,) = admin.ListRequests(admin_pb2.ListRequestsRequest()).requests
        for bad, code in (("", grpc.StatusCode.INVALID_ARGUMENT), ("nobody", grpc.StatusCode.NOT_FOUND)):
            with pytest.raises(grpc.RpcError) as raised:
                admin.AbortRequest(admin_pb2.AbortRequestRequest(request_id=bad))
            assert raised.value.code() == code
        admin.AbortRequest(admin_pb2.AbortRequestRequest(request_id=found.key.request_id))
    caller.thread.join(5)
    assert '"finish_reason":"abort"' in "".join(caller.lines)
    cluster.wait_idle(LIMIT_S)


def test_a_storm_of_aborts_leaves_nothing_and_changes_no_text(cluster: Cluster, model: DeepSeekV4Model):
    expected = generate(model, prompt(200), 8, chunk_tokens=512, stop_at_eos=False)
    callers: list[Caller] = []
    for index in range(24):
        callers.append(Caller(cluster, prompt(100 + 40 * index), stream=index % 2 == 0))
        time.sleep(0.02)
        if index % 3 == 2:
            callers.pop(0).leave()
    for caller in callers:
        caller.leave()
    cluster.wait_idle(3)
    assert cluster.generate("calm", prompt(200), max_tokens=8).tokens == expected
    cluster.wait_idle(LIMIT_S)


def test_sigterm_lets_a_running_stream_end(checkpoint: Path, tmp_path: Path):
    cluster = Cluster(checkpoint, tmp_path, with_router=True).start()
    caller = Caller(cluster, prompt(20), max_tokens=200)
    caller.first_line.wait(10)
    for service in (cluster.router, cluster.decode, cluster.prefill):
        assert service is not None
        service.signal(signal.SIGTERM)
    caller.thread.join(30)
    assert caller.error is None
    assert caller.lines[-2] == "data: [DONE]"
    statuses = cluster.stop()
    logs = [service.log_tail(8) for service in (cluster.router, cluster.decode, cluster.prefill) if service]
    assert statuses == [0, 0, 0], "\n\n".join(logs)


def test_a_second_sigterm_while_a_service_ends_changes_nothing(checkpoint: Path, tmp_path: Path):
    cluster = Cluster(checkpoint, tmp_path, with_router=True).start()
    services = [service for service in (cluster.router, cluster.decode, cluster.prefill) if service is not None]
    end = time.monotonic() + 20
    while any(service.process is not None and service.process.poll() is None for service in services):
        assert time.monotonic() < end
        for service in services:
            service.signal(signal.SIGTERM)
        time.sleep(0.01)
    assert [service.process.returncode for service in services if service.process] == [0, 0, 0]
