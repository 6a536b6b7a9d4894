"""Bodies, headers and routes: what is refused, by which name, in which shape."""

import json
from typing import Any

import pytest

from router_service.app import RouterState
from tests.unit.router.conftest import Router, ServeRouter
from tests.unit.router.scripted_worker import ScriptedWorker

# What the tests over real workers do not ask already.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": True}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[5], []]}, "prompt"),
    ({"prompt": ["x"] * 2000}, "prompt"),
    ({"prompt": ["x"] * 100, "n": 100}, "n"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 2**70}, "max_tokens"),
    ({"prompt": "x", "temperature": True}, "temperature"),
    ({"prompt": "x", "top_p": 1.01}, "top_p"),
    ({"prompt": "x", "top_k": -2}, "top_k"),
    ({"prompt": "x", "min_p": 2}, "min_p"),
    ({"prompt": "x", "presence_penalty": 3}, "presence_penalty"),
    ({"prompt": "x", "frequency_penalty": -3}, "frequency_penalty"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "x", "best_of": 0}, "best_of"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "seed": 2**63}, "seed"),
    ({"prompt": "x", "seed": "7"}, "seed"),
    ({"prompt": "x", "n": 129}, "n"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "logprobs": -1}, "logprobs"),
    ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"260": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt": "x", "stop": ["a"] * 65}, "stop"),
    ({"prompt": "x", "stream": True, "stream_options": {"include_usgae": True}}, "stream_options.include_usgae"),
    ({"prompt": "x", "stream": True, "stream_options": 1}, "stream_options"),
    ({"prompt": "x", "echo": 1}, "echo"),
    ({"prompt": "x", "user": 5}, "user"),
    ({"prompt": "x", "priority": 2**31}, "priority"),
    ({"prompt": "x", "tools": []}, "tools"),
    ({"prompt": "x" * 4090, "max_tokens": 7}, "max_tokens"),
]


async def test_bad_parameters_are_400_by_name_twice_reach_no_worker_and_the_next_request_works(
    serve_router: ServeRouter,
):
    worker = ScriptedWorker()
    router = await serve_router([worker])
    for body, param in BAD:
        for _ in range(2):
            answer = await router.post(**body)
            assert answer.status_code == 400, body
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["param"], error["type"]) == (param, "invalid_request_error")
            assert param.rpartition(".")[2] in error["message"]
        assert worker.requests == []
        assert router.state.in_flight == 0
        assert (await router.post(prompt="x")).status_code == 200
        worker.requests.clear()


RAW = [
    b"",
    b"[" * 100_000,
    b'{"prompt": "x", "seed": ' + b"1" * 6000 + b"}",
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "logit_bias": {"5": NaN}}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ["\\ud800"]}',
    b'{"prompt": "x", "stop": "\\ud800"}',
    b'{"prompt": "x", "\\ud800": 1}',
    b'{"prompt": "x", "model": "\\ud800"}',
    b'{"prompt": "x", "logit_bias": {"\\ud800": 1}}',
]


async def test_bodies_that_are_no_request_are_4xx_in_the_same_shape(serve_router: ServeRouter):
    worker = ScriptedWorker()
    router = await serve_router([worker])
    for content in RAW:
        headers = {"content-type": "application/json"}
        answer = await router.client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code in (400, 404), content[:60]
        assert answer.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
        assert worker.requests == []
    assert (await router.post(prompt="fine")).status_code == 200


async def test_a_body_over_the_limit_is_413(serve_router: ServeRouter):
    router = await serve_router(max_body_bytes=1000)
    answer = await router.post(prompt="x" * 2000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")
    assert (await router.post(prompt="x")).status_code == 200


async def test_other_routes_and_methods_answer_in_the_same_shape(serve_router: ServeRouter):
    router = await serve_router()
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
    ):
        answer = await router.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
        assert (answer.headers.get("allow") is not None) == (status == 405)


async def test_the_request_id_is_the_clients_in_answer_and_metadata(serve_router: ServeRouter):
    worker = ScriptedWorker()
    router = await serve_router([worker])
    for stream in (False, True):
        answer = await router.post(prompt="x", stream=stream, headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
    # The same id twice is no conflict: calls to workers have ids of their own.
    assert [m["x-request-id"] for m in worker.metadata] == ["mine-1", "mine-1"]
    assert len({r.request_id for r in worker.requests}) == 2
    for bad in (b"", b"x" * 129, b"a b", b"\xe9"):
        drawn = (await router.client.get("/health", headers={"x-request-id": bad})).headers["x-request-id"]
        assert len(drawn) == 32


async def test_an_unexpected_error_is_a_counted_500_with_the_request_id(
    serve_router: ServeRouter, monkeypatch: pytest.MonkeyPatch
):
    def broken(state: RouterState) -> None:
        def encode(_: str) -> list[int]:
            raise ZeroDivisionError

        monkeypatch.setattr(state.tokenizer, "encode", encode)

    router: Router = await serve_router()
    broken(router.state)
    answer = await router.post(prompt="x", headers={"x-request-id": "mine-2"})
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "internal error", "type": "server_error", "param": None, "code": "internal",
    }  # fmt: skip
    assert answer.headers["x-request-id"] == "mine-2"
    assert router.state.in_flight == 0
    assert await router.metric('dsv4pd_router_requests_total{path="/v1/completions",status="500"}') == 1


async def test_models_and_the_name_of_another(serve_router: ServeRouter):
    router = await serve_router(model_name="org/name")
    (model,) = (await router.client.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("org/name", "model", 4096)
    assert (await router.client.get("/v1/models/org/name")).json() == model
    missing = await router.client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert (await router.post(prompt="x", model="other")).status_code == 404
    assert (await router.post(prompt="x", model="org/name")).status_code == 200


async def test_a_long_prompt_leaves_the_loop_free(serve_router: ServeRouter, monkeypatch: pytest.MonkeyPatch):
    """Tokenising happens beside the event loop, so that other clients' tokens go on."""
    import threading

    router = await serve_router([ScriptedWorker()])
    seen: list[threading.Thread] = []
    encode = router.state.tokenizer.encode

    def watched(text: str) -> list[int]:
        seen.append(threading.current_thread())
        return encode(text)

    monkeypatch.setattr(router.state.tokenizer, "encode", watched)
    answer = await router.post(prompt="x" * 500_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (await router.post(prompt="x")).status_code == 200
    assert (seen[0] is threading.main_thread(), seen[-1] is threading.main_thread()) == (False, True)


async def test_metrics_count_tokens_both_ways(serve_router: ServeRouter):
    router = await serve_router()
    await router.post(prompt="hello", n=2)
    assert await router.metric("dsv4pd_router_prompt_tokens_total") == 5
    assert await router.metric("dsv4pd_router_output_tokens_total") == 4
    assert await router.metric("dsv4pd_router_first_token_seconds_count") == 2
    assert await router.metric("dsv4pd_router_between_tokens_seconds_count") == 2
    assert await router.metric('dsv4pd_router_usable_workers{role="prefill"}') == 1
    assert json.loads((await router.client.get("/version")).text)["version"]
