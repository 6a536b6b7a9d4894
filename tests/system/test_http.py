"""The HTTP door over the real pair: OpenAI's shapes, rules of server-sent events, errors by name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.model.config import ModelConfig
from common.model.tokenizer import load_tokenizer
from tests.support.cluster import Cluster

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(checkpoint, tmp_path_factory.mktemp("http"), with_router=True).start()
    yield made
    assert made.stop() == [0, 0, 0]


def post(cluster: Cluster, **body: Any) -> httpx.Response:
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)


def chunks(cluster: Cluster, **body: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json={"stream": True} | body, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = b"".join(response.iter_raw()).decode()
    events = raw.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event[6:]) for event in events[:-2]]


def test_streamed_deltas_are_the_text_of_the_answer_that_does_not_stream(cluster: Cluster):
    body = {"prompt": "hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    whole = post(cluster, **body).json()
    streamed = chunks(cluster, **body)
    assert "".join(c["choices"][0]["text"] for c in streamed) == whole["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in streamed][-1] == "length"
    assert all("usage" not in c for c in streamed)
    assert whole["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29, "prompt_tokens_details": None,
    }  # fmt: skip
    assert whole["object"] == "text_completion"
    assert whole["id"].startswith("cmpl-")


def test_the_usage_chunk_comes_only_when_asked_for(cluster: Cluster):
    streamed = chunks(cluster, prompt="hi", max_tokens=3, ignore_eos=True, stream_options={"include_usage": True})
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"]["completion_tokens"] == 3
    assert all(c["usage"] is None for c in streamed[:-1])


def test_every_form_of_prompt_gives_the_same_text(cluster: Cluster, checkpoint: Path):
    tokens = load_tokenizer(checkpoint, ModelConfig.from_file(checkpoint)).encode("héllo")
    settings = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    texts = [
        [c["text"] for c in post(cluster, prompt=p, **settings).json()["choices"]]
        for p in ("héllo", ["héllo"], tokens, [tokens], ["héllo", "héllo"])
    ]
    assert all(text == texts[0][0] for group in texts for text in group)
    assert len(texts[-1]) == 2


def test_n_choices_have_their_own_index_and_seed(cluster: Cluster):
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 8, "temperature": 1, "seed": 5, "ignore_eos": True}
    first, again = post(cluster, **body).json(), post(cluster, **body).json()
    assert [c["index"] for c in first["choices"]] == [0, 1, 2, 3]
    texts = [c["text"] for c in first["choices"]]
    assert texts[0] != texts[1]
    assert texts == [c["text"] for c in again["choices"]]
    streamed = chunks(cluster, **body)
    for index in range(4):
        mine = [c["choices"][0] for c in streamed if c["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in mine) == texts[index]


def test_stop_strings_end_the_text_and_are_not_shown(cluster: Cluster):
    body = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = post(cluster, **body).json()["choices"][0]["text"]
    stop = next(text[i : i + 2] for i in range(6, len(text) - 2) if "\ufffd" not in text[i : i + 2])
    place = text.index(stop)
    for made in (
        post(cluster, stop=stop, **body).json()["choices"][0],
        post(cluster, stop=["never seen", stop], **body).json()["choices"][0],
    ):
        assert (made["text"], made["finish_reason"]) == (text[:place], "stop")
    streamed = chunks(cluster, stop=stop, **body)
    assert "".join(c["choices"][0]["text"] for c in streamed) == text[:place]
    cluster.wait_idle(1)


def test_echo_and_logprobs_cover_prompt_and_output(cluster: Cluster):
    made = post(
        cluster, prompt=[[70, 71, 72]], max_tokens=2, logprobs=1, echo=True, temperature=0, ignore_eos=True
    ).json()["choices"][0]
    logprobs = made["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 5
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(len(top) == 1 for top in logprobs["top_logprobs"][1:])
    assert logprobs["tokens"][:3] == ["B", "C", "D"]
    assert made["text"].startswith("BCD")
    # Greedy: the chosen token is the best one.
    assert logprobs["token_logprobs"][3] == pytest.approx(next(iter(logprobs["top_logprobs"][3].values())))


BAD = [
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": "3"}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**7}, "max_tokens"),
    ({"prompt": "x" * 50_000, "max_tokens": 4}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [260]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({}, "prompt"),
    ({"prompt": "x", "frobnicate": 1}, "frobnicate"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": True}, "n"),
    ({"prompt": "x", "best_of": 3}, "best_of"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "stop": 5}, "stop"),
    ({"prompt": "x", "logit_bias": {"abc": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"5": 1000}}, "logit_bias"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"prompt": "x", "stop_token_ids": [999]}, "stop_token_ids"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_input_is_400_by_name_twice_and_the_next_request_works(cluster: Cluster, body: dict[str, Any], param: str):
    for _ in range(2):
        answer = post(cluster, **body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert param in error["message"]
    assert post(cluster, prompt="ok", max_tokens=1).status_code == 200


@pytest.mark.parametrize("content", [b"{", b"[]", b"null", b'{"prompt": "x", "temperature": NaN}', b"\xff\xfe"])
def test_bodies_that_are_no_request_are_400(cluster: Cluster, content: bytes):
    answer = httpx.post(f"{cluster.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_models_health_version_and_metrics(cluster: Cluster):
    (model,) = httpx.get(f"{cluster.url}/v1/models").json()["data"]
    assert model["id"] == "small"
    assert httpx.get(f"{cluster.url}/v1/models/small").json()["id"] == "small"
    assert httpx.get(f"{cluster.url}/v1/models/large").status_code == 404
    assert post(cluster, prompt="x", model="large").status_code == 404
    assert post(cluster, prompt="x", model="small", max_tokens=1).status_code == 200
    assert httpx.get(f"{cluster.url}/health").status_code == 200
    assert httpx.get(f"{cluster.url}/ready").json()["ready"] is True
    assert httpx.get(f"{cluster.url}/version").json()["version"]
    metrics = httpx.get(f"{cluster.url}/metrics").text
    assert "dsv4pd_router_first_token_seconds_count" in metrics
    assert 'dsv4pd_router_usable_workers{role="decode"} 1.0' in metrics
    assert httpx.head(f"{cluster.url}/metrics").status_code == 200


def test_a_request_id_is_echoed_if_it_is_printable_and_drawn_otherwise(cluster: Cluster):
    url = f"{cluster.url}/health"
    assert httpx.get(url, headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("", "x" * 129, "a b"):
        drawn = httpx.get(url, headers={"x-request-id": bad}).headers["x-request-id"]
        assert drawn != bad
        assert len(drawn) == 32
    assert '"request_id"' in (cluster.router.log.read_text() if cluster.router else "")


def test_logs_are_json_lines(cluster: Cluster):
    post(cluster, prompt="x", max_tokens=1)
    assert cluster.router is not None
    for line in cluster.router.log.read_text().splitlines():
        json.loads(line)
