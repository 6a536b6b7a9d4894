"""Prefill as a team of processes over torch.distributed (gloo): the text of one process, every page once."""

import signal
import socket
import time
from pathlib import Path

import grpc
import pytest

from common.model.model import DeepSeekV4Model
from tests.support.cluster import Cluster
from tests.support.monolithic import generate
from tests.support.processes import Service
from tests.system.test_pair import prompt

pytestmark = [pytest.mark.system]
OUTPUT = 10
LENGTHS = (1, 3, 5, 128, 255, 257, 513, 1000, 1300)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class TeamCluster(Cluster):
    """The cluster's prefill leads a team; `followers` are its other processes."""

    followers: list[Service]

    def start_team(self, size: int, *shape: str) -> "TeamCluster":
        rendezvous = ("--rendezvous", f"127.0.0.1:{free_port()}", *shape)
        flags = ("--model", str(self.model), "--send-ring-bytes", str(32 << 20), "--threads", "1", *rendezvous)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.followers = [
            Service("prefill_service", self.folder, *flags, "--rank", str(rank), name=f"follower-{rank}").launch()
            for rank in range(1, size)
        ]
        self.prefill_flags = rendezvous
        self.start()
        return self

    def stop_team(self) -> list[int]:
        """Exit statuses: decode, leader, followers, which end with their leader."""
        return self.stop() + [follower.process.wait(20) for follower in self.followers if follower.process]


SHAPES = {
    "two stages": (2, ("--pipeline-stages", "2")),
    "three stages": (3, ("--pipeline-stages", "3")),
    "three uneven stages": (3, ("--pipeline-stages", "3", "--pipeline-layers", "1,1,LEFT")),
    "two tensor ranks": (2, ("--tensor-ranks", "2")),
    "three tensor ranks": (3, ("--tensor-ranks", "3")),
}


@pytest.mark.parametrize("shape", [
    "two stages",
    *(pytest.param(name, marks=pytest.mark.slow) for name in SHAPES if name != "two stages"),
])  # fmt: skip
def test_text_equals_one_process(checkpoint: Path, tmp_path: Path, model: DeepSeekV4Model, shape: str):
    size, flags = SHAPES[shape]
    flags = tuple(flag.replace("LEFT", str(model.config.num_layers - 2)) for flag in flags)
    cluster = TeamCluster(checkpoint, tmp_path, decode_flags=("--hot-entries", "64")).start_team(size, *flags)
    try:
        answers = cluster.generate_together([prompt(length) for length in LENGTHS], at_once=4, max_tokens=OUTPUT)
        for length, answer in zip(LENGTHS, answers, strict=True):
            assert answer.tokens == generate(model, prompt(length), OUTPUT, chunk_tokens=512, stop_at_eos=False), length
        cluster.wait_idle(3)
        assert cluster.decode.status().counters["fences"] == 0
        assert cluster.decode.status().counters.get("late", 0) == 0
    finally:
        statuses = cluster.stop_team()
    assert statuses == [0] * (size + 1)


def test_a_cancel_waits_for_all_and_a_lost_process_ends_the_team(
    checkpoint: Path, tmp_path: Path, model: DeepSeekV4Model
):
    slow = ("--transfer-bytes-per-s", "1000000", "--transfer-run-bytes", "16384", "--transfer-batch-runs", "1")
    cluster = TeamCluster(checkpoint, tmp_path).start_team(2, "--pipeline-stages", "2", *slow)
    from common.rpc.gen.dsv4pd.v1 import common_pb2, decode_pb2, decode_pb2_grpc

    with grpc.insecure_channel(cluster.decode.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(
            decode_pb2.GenerateRequest(
                request_id="left",
                prefill_address=cluster.prefill.address,
                token_ids=prompt(1500),
                sampling=common_pb2.SamplingParams(max_tokens=4),
            )
        )
        cluster.wait_phase(cluster.prefill, "sending")
        call.cancel()
    cluster.wait_idle(5)
    assert cluster.decode.status().counters["fences"] == 0, "all of the team answered that they drained"
    assert cluster.generate("next", prompt(300), 6).tokens == generate(
        model, prompt(300), 6, chunk_tokens=512, stop_at_eos=False
    )
    cluster.followers[0].signal(signal.SIGKILL)
    assert cluster.prefill.process is not None
    begun = time.monotonic()
    assert cluster.prefill.process.wait(20) == 1
    assert time.monotonic() - begun < 10
    cluster.decode.wait_idle(5)
    assert cluster.decode.stop() == 0
