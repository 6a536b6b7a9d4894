"""Prefill and decode as real processes over real Mooncake: the same text as one process alone."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from common.model.model import DeepSeekV4Model
from common.rpc.gen.dsv4pd.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tests.support.cluster import Cluster
from tests.support.lengths import SWEEP
from tests.support.monolithic import generate

pytestmark = pytest.mark.system
OUTPUT = 12


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(4, 260, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def references(model: DeepSeekV4Model) -> dict[int, list[int]]:
    """Greedy text of each length, alone, in this process."""
    return {length: generate(model, prompt(length), OUTPUT, chunk_tokens=512, stop_at_eos=False) for length in SWEEP}


HOMES = {
    "smallest-hot-buffer": ("--hot-entries", "64", "--resident-pages", "0"),
    "three-homes": ("--hot-entries", "64", "--resident-pages", "6"),
    "all-resident": ("--hot-entries", "64", "--resident-pages", "1024"),
    "all-hot": ("--hot-entries", "512"),
}


@pytest.fixture(
    scope="module",
    params=[
        "smallest-hot-buffer",
        "three-homes",
        pytest.param("all-resident", marks=pytest.mark.slow),
        pytest.param("all-hot", marks=pytest.mark.slow),
    ],
)
def cluster(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    made = Cluster(checkpoint, tmp_path_factory.mktemp("pair"), decode_flags=HOMES[request.param]).start()
    yield made
    assert made.stop() == [0, 0]


def test_greedy_text_equals_a_monolithic_run_at_every_length_eight_at_once(
    cluster: Cluster, references: dict[int, list[int]]
):
    answers = cluster.generate_together([prompt(length) for length in SWEEP], at_once=8, max_tokens=OUTPUT)
    wrong = [length for length, answer in zip(SWEEP, answers, strict=True) if answer.tokens != references[length]]
    assert not wrong
    for length, answer in zip(SWEEP, answers, strict=True):
        assert answer.finished.prompt_tokens == length
        assert answer.finished.completion_tokens == OUTPUT
    cluster.wait_idle(2)


def test_rows_are_found_where_there_is_room_for_them(cluster: Cluster):
    cluster.generate_together([prompt(1000, seed) for seed in range(4)], at_once=4, max_tokens=24)
    status = cluster.decode.status()
    (home,) = [name for name, flags in HOMES.items() if flags == cluster.decode_flags]
    assert (status.counters["hot_misses"] > 0) == (home in ("smallest-hot-buffer", "three-homes"))
    assert (status.counters["resident_hits"] > 0) == (home in ("three-homes", "all-resident"))
    assert (status.counters["resident_spills"] > 0) == (home == "three-homes")
    assert status.counters["hot_hits"] > 0
    assert status.counters["backups"] > 0
    pools = {pool.name: pool for pool in status.pools}
    assert pools["hot"].free == pools["hot"].total
    if home != "smallest-hot-buffer":
        assert pools["resident"].free == pools["resident"].total
        assert pools["resident"].item_bytes == pools["host_c4"].item_bytes


def test_decoding_over_page_borders_equals_a_monolithic_run(cluster: Cluster, model: DeepSeekV4Model):
    lengths = [250, 505, 119]
    expected = [generate(model, prompt(n, 7), 24, chunk_tokens=512, stop_at_eos=False) for n in lengths]
    answers = cluster.generate_together([prompt(n, 7) for n in lengths], max_tokens=24)
    assert [answer.tokens for answer in answers] == expected


def test_the_same_seed_gives_the_same_text_whatever_else_is_in_the_batch(cluster: Cluster):
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "max_tokens": 16}
    alone = cluster.generate("alone", prompt(77), **settings)
    together = cluster.generate_together([prompt(77), *(prompt(n, 3) for n in (5, 300, 130, 64))], **settings)
    assert together[0].tokens == alone.tokens
    other = cluster.generate("other", prompt(77), **(settings | {"seed": 8}))
    assert other.tokens != alone.tokens
    assert alone.finished.seed == 7


def test_stopping_rules(cluster: Cluster, references: dict[int, list[int]]):
    text = references[70]
    one = cluster.generate("one", prompt(70), max_tokens=1)
    assert one.tokens == text[:1]
    assert one.finished.reason == decode_pb2.FINISH_REASON_LENGTH
    third = text[2]
    at = text.index(third)
    stopped = cluster.generate("stop", prompt(70), max_tokens=10, stop_token_ids=[third])
    assert stopped.tokens == text[: at + 1]
    assert stopped.finished.reason == decode_pb2.FINISH_REASON_STOP
    assert stopped.finished.stop_token_id == third
    first = cluster.generate("first", prompt(70), max_tokens=10, stop_token_ids=[text[0]])
    assert first.tokens == text[:1]
    held = cluster.generate("held", prompt(70), max_tokens=10, min_tokens=6, stop_token_ids=[text[0]])
    assert len(held.tokens) >= 6
    assert text[0] not in held.tokens[:5]
    cluster.wait_idle(2)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 63, 64, 127, 128, 129])
def test_a_short_prompt_ends_at_its_stop_token(cluster: Cluster, references: dict[int, list[int]], length: int):
    """Below 4 tokens there is no C4 entry yet, below 128 no C128 entry: a greeting must not become a novel."""
    text = references[length]
    stop = text[4]
    stopped = cluster.generate(f"short {length}", prompt(length), max_tokens=100, stop_token_ids=[stop])
    assert stopped.tokens == text[: text.index(stop) + 1]
    assert stopped.finished.reason == decode_pb2.FINISH_REASON_STOP
    assert stopped.finished.completion_tokens == len(stopped.tokens)


def status_of(cluster: Cluster, **fields: object) -> tuple[grpc.StatusCode, str]:
    with grpc.insecure_channel(cluster.decode.address) as channel:
        values = {"request_id": "x", "prefill_address": cluster.prefill.address, "token_ids": [5]} | fields
        try:
            list(decode_pb2_grpc.DecodeStub(channel).Generate(decode_pb2.GenerateRequest(**values), timeout=20))
        except grpc.RpcError as error:
            return error.code(), error.details()
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize(
    ("fields", "code", "part"),
    [
        ({"token_ids": []}, grpc.StatusCode.INVALID_ARGUMENT, "prompt is empty"),
        ({"token_ids": [260]}, grpc.StatusCode.INVALID_ARGUMENT, "token id 260"),
        ({"request_id": ""}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        ({"prefill_address": "nowhere"}, grpc.StatusCode.INVALID_ARGUMENT, "nowhere"),
        ({"prefill_address": "127.0.0.1:1"}, grpc.StatusCode.UNAVAILABLE, "127.0.0.1:1"),
        ({"sampling": common_pb2.SamplingParams(max_tokens=0)}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        ({"sampling": common_pb2.SamplingParams(max_tokens=10**6)}, grpc.StatusCode.INVALID_ARGUMENT, "1000000"),
        (
            {"sampling": common_pb2.SamplingParams(max_tokens=1, temperature=-1)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature",
        ),
    ],
)
def test_bad_requests_get_a_typed_error_and_the_next_one_works(
    cluster: Cluster, fields: dict, code: grpc.StatusCode, part: str
):
    fields = {"sampling": common_pb2.SamplingParams(max_tokens=2)} | fields
    for _ in range(2):
        found, details = status_of(cluster, **fields)
        assert found == code
        assert part in details
    assert len(cluster.generate("good", [5, 6, 7], max_tokens=3).tokens) == 3
    cluster.wait_idle(2)


def test_a_living_request_id_is_refused_a_second_time(cluster: Cluster):
    with grpc.insecure_channel(cluster.decode.address) as channel:
        stub = decode_pb2_grpc.DecodeStub(channel)
        request = decode_pb2.GenerateRequest(
            request_id="twice", prefill_address=cluster.prefill.address, token_ids=[5] * 10,
            sampling=common_pb2.SamplingParams(max_tokens=400, ignore_eos=True),
        )  # fmt: skip
        first = stub.Generate(request)
        next(first)
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Generate(request))
        assert raised.value.code() == grpc.StatusCode.ALREADY_EXISTS
        first.cancel()
    cluster.wait_idle(2)
    assert cluster.generate("twice", [5] * 10, max_tokens=2).tokens
