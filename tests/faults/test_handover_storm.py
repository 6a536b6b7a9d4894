"""The handover under fire: a tiny pool, a slow link, hundreds of aborts, prefill killed and stopped mid-write.

Pages are so few that whatever an aborted writer still sends would land in somebody else's. Those somebodies are
requests that are let alone: their texts must be what the model says when it is alone.
"""

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.model.model import DeepSeekV4Model
from common.rpc.gen.dsv4pd.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tests.support.cluster import Cluster
from tests.support.monolithic import generate
from tests.support.processes import Service
from tests.system.test_pair import prompt

pytestmark = [pytest.mark.system, pytest.mark.slow]
ABORTS = 500
OUTPUT = 12
# 24 pages hold four victims or so: every freed page is used again at once.
DECODE = (
    "--host-pages", "24", "--logical-pages", "24", "--max-requests", "6", "--hot-entries", "64", "--max-queued", "600",
    "--cancel-timeout-s", "3",
)  # fmt: skip
# Small writes at 8 MB/s: a handover lasts as long as it takes to compute.
SLOW = ("--transfer-run-bytes", "16384", "--transfer-batch-runs", "4", "--transfer-bytes-per-s", "8000000")
VICTIMS = (70, 300, 515, 700, 1025)


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(checkpoint, tmp_path_factory.mktemp("storm"), SLOW, DECODE).start()
    yield made
    assert made.stop() == [0, 0]


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> Iterator[Service]:
    """Another prefill, which nobody touches."""
    flags = ("--model", str(cluster.model), "--send-ring-bytes", str(32 << 20), "--threads", "1", *SLOW)
    made = Service("prefill_service", cluster.folder, *flags, name="second").start()
    yield made
    assert made.stop() == 0


@pytest.fixture(scope="module")
def texts(model: DeepSeekV4Model) -> dict[int, list[int]]:
    return {length: generate(model, prompt(length), OUTPUT, chunk_tokens=512, stop_at_eos=False) for length in VICTIMS}


class Storm:
    """Requests to one prefill that are cancelled at a random moment of their lives."""

    def __init__(self, cluster: Cluster, address: str, seed: int, longest_s: float = 0.4) -> None:
        self.address = address
        self._longest_s = longest_s
        self.ends: dict[str, int] = {}
        self.reserved = 0
        self._cluster = cluster
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def abort(self, index: int) -> None:
        with self._lock:
            length, delay = self._random.randint(200, 1800), self._random.uniform(0.0, self._longest_s)
        request = decode_pb2.GenerateRequest(
            request_id=f"storm-{self.address}-{index}",
            prefill_address=self.address,
            token_ids=prompt(length, 7),
            sampling=common_pb2.SamplingParams(max_tokens=40, ignore_eos=True),
        )
        with grpc.insecure_channel(self._cluster.decode.address) as channel:
            call: Any = decode_pb2_grpc.DecodeStub(channel).Generate(request, timeout=60)
            timer = threading.Timer(delay, call.cancel)
            timer.start()
            try:
                for event in call:
                    self.reserved += event.HasField("reserved")
                code = "OK"
            except grpc.RpcError as error:
                code = error.code().name  # type: ignore[attr-defined]
            timer.cancel()
        with self._lock:
            self.ends[code] = self.ends.get(code, 0) + 1


class Victims:
    """Requests that are let alone, one after another, until `stop`."""

    def __init__(self, cluster: Cluster, address: str, texts: dict[int, list[int]]) -> None:
        self._cluster = cluster
        self._address = address
        self._texts = texts
        self._stopping = threading.Event()
        self.right = 0
        self.wrong: list[tuple[int, list[int]]] = []
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(2)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        index = number
        while not self._stopping.is_set():
            length = VICTIMS[index % len(VICTIMS)]
            request_id = f"victim-{self._address}-{number}-{index}"
            try:
                tokens = self._cluster.generate_from(self._address, request_id, prompt(length), OUTPUT)
            except grpc.RpcError as error:
                self.errors.append(str(error))
            else:
                if tokens == self._texts[length]:
                    self.right += 1
                else:
                    self.wrong.append((length, tokens))
            index += 1

    def __enter__(self) -> "Victims":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)


def wait_for_fence(cluster: Cluster) -> None:
    """Until nothing of a stopped prefill is held any more: all that runs is the victims'."""
    end = time.monotonic() + 15
    while any("storm" in key for key in cluster.living()):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_500_aborts_leave_their_neighbours_alone(cluster: Cluster, second: Service, texts: dict[int, list[int]]):
    storm = Storm(cluster, cluster.prefill.address, 1, longest_s=1.0)
    with Victims(cluster, second.address, texts) as victims, ThreadPoolExecutor(10) as threads:
        list(threads.map(storm.abort, range(ABORTS)))
    assert victims.wrong == []
    assert victims.errors == []
    assert victims.right >= 5
    assert sum(storm.ends.values()) == ABORTS
    # Enough of them were in the middle of something.
    assert storm.ends["CANCELLED"] > ABORTS // 2
    assert storm.reserved > ABORTS // 4
    cluster.wait_idle(5)
    status = cluster.decode.status(check_integrity=True)
    assert status.counters["quarantine_alarm"] == 0
    assert status.counters["fences"] == 0, "a cancel that is answered fences nobody"


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_prefill_dies_or_sleeps_mid_write_again_and_again(
    cluster: Cluster, second: Service, texts: dict[int, list[int]], how: str
):
    port = int(cluster.prefill.address.rpartition(":")[2])
    before = cluster.decode.status().counters["fences"]
    rounds, moments = 6, random.Random(how)
    with Victims(cluster, second.address, texts) as victims:
        for number in range(rounds):
            storm = Storm(cluster, cluster.prefill.address, 100 + number, longest_s=3.0)
            calls: list[threading.Thread] = []
            for index in range(6):
                calls.append(threading.Thread(target=storm.abort, args=(1000 * number + index,)))
                calls[-1].start()
            # Any moment: with so slow a link most of them are in the middle of a write.
            time.sleep(moments.uniform(0.3, 1.2))
            if how == "kill":
                cluster.prefill.kill()
                cluster.prefill.start(port)
            else:
                cluster.prefill.signal(signal.SIGSTOP)
                # Its requests are given up and its session is fenced; its pages are used by the victims.
                for call in calls:
                    call.join(60)
                wait_for_fence(cluster)
                time.sleep(0.5)
                pools = {pool.name: pool for pool in cluster.decode.status().pools}
                assert pools["host_c4"].quarantined == 0
                cluster.prefill.signal(signal.SIGCONT)
            for call in calls:
                call.join(60)
    assert victims.wrong == []
    assert victims.errors == []
    assert victims.right >= rounds
    cluster.wait_idle(5)
    assert cluster.decode.status().counters["fences"] >= before + rounds // 2
    # And the one that died or slept is as good as before.
    assert cluster.generate("after", prompt(515), OUTPUT).tokens == texts[515]
