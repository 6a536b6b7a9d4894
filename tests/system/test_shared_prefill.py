"""Identical prompts at the same time: computed once, and each still has its own pages, text and end."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch

from common.model.model import DeepSeekV4Model, PrefillChunk
from common.rpc.gen.dsv4pd.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tests.support.cluster import Cluster
from tests.support.local_kv import LocalSequence
from tests.support.monolithic import generate

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("shared")
    made = Cluster(
        checkpoint, folder, prefill_flags=("--chunk-tokens", "256", "--step-tokens", "256"), with_router=True
    ).start()
    yield made
    assert made.stop() == [0, 0, 0]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(4, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def post(cluster: Cluster, **body: Any) -> dict[str, Any]:
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120).json()


def shared(cluster: Cluster) -> float:
    return cluster.prefill.status(check_integrity=False).counters.get("shared", 0)


def test_choices_of_one_prompt_share_its_prefill_and_keep_their_own_text(cluster: Cluster, model: DeepSeekV4Model):
    tokens, before = prompt(700, 1), shared(cluster)
    body = {"prompt": tokens, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor(1) as beside:
        # While this is computed the choices queue up behind it, all of them before their first chunk.
        blocker = beside.submit(post, cluster, prompt=prompt(3000, 2), max_tokens=1)
        cluster.wait_phase(cluster.prefill, "computing")
        made = post(cluster, **body, n=5, temperature=1, seed=7)
        assert blocker.result()["usage"]["prompt_tokens"] == 3000
    assert shared(cluster) - before == 4
    alone = [post(cluster, **body, temperature=1, seed=7 + i)["choices"][0]["token_ids"] for i in range(5)]
    assert [choice["token_ids"] for choice in made["choices"]] == alone
    assert len({tuple(ids) for ids in alone}) > 1
    greedy = post(cluster, **body, n=2, temperature=0)["choices"]
    expected = generate(model, tokens, 8, chunk_tokens=256, stop_at_eos=False)
    assert [choice["token_ids"] for choice in greedy] == [expected, expected]
    cluster.wait_idle(2)


def test_a_sharer_goes_on_when_the_one_that_was_computed_is_cancelled(cluster: Cluster, model: DeepSeekV4Model):
    tokens = prompt(1500, 3)
    expected = generate(model, tokens, 4, chunk_tokens=256, stop_at_eos=False)
    before = shared(cluster)

    def call(name: str) -> Any:
        sampling = common_pb2.SamplingParams(max_tokens=4, ignore_eos=True)
        request = decode_pb2.GenerateRequest(
            request_id=name, prefill_address=cluster.prefill.address, token_ids=tokens, sampling=sampling
        )
        return decode_pb2_grpc.DecodeStub(channel).Generate(request, timeout=60)

    with ThreadPoolExecutor(1) as beside, grpc.insecure_channel(cluster.decode.address) as channel:
        blocker = beside.submit(post, cluster, prompt=prompt(3000, 4), max_tokens=1)
        cluster.wait_phase(cluster.prefill, "computing")
        first, second = call("leader"), call("sharer")
        cluster.wait_phase(cluster.prefill, "queued")
        blocker.result()
        first.cancel()
        ids = [token for event in second for token in event.tokens.token_ids]
    assert ids == expected
    assert shared(cluster) - before == 1
    cluster.wait_idle(2)


def test_prompt_logprobs_are_the_models_over_chunk_borders_for_a_batch_of_token_lists(
    cluster: Cluster, model: DeepSeekV4Model
):
    """What lm-eval's local-completions sends: [[int]], echo, logprobs 1, max_tokens 1; here shared by two of three."""
    prompts = [prompt(600, 5), prompt(600, 5), prompt(37, 6)]
    answer = post(cluster, prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, tokens in zip(answer["choices"], prompts, strict=True):
        found = choice["logprobs"]
        (logits,) = model.prefill([PrefillChunk(torch.tensor(tokens), LocalSequence(model.config), "all")])
        assert logits is not None
        expected = torch.log_softmax(logits[:-1].double(), -1)
        assert len(found["token_logprobs"]) == len(tokens) + 1
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        chosen = expected[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
        assert found["token_logprobs"][1:-1] == pytest.approx(chosen.tolist(), abs=2e-3)
        best = [next(iter(top.values())) for top in found["top_logprobs"][1:-1]]
        assert best == pytest.approx(expected.max(dim=1).values.tolist(), abs=2e-3)
    assert answer["usage"]["completion_tokens"] == 3
    assert json.dumps(answer["choices"][0]["logprobs"]) == json.dumps(answer["choices"][1]["logprobs"])
    cluster.wait_idle(2)
