"""POST /v1/chat/completions: objects, deltas, reasoning, what is refused."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.model.tokenizer import decode
from common.rpc.gen.dsv4pd.v1 import decode_pb2
from router_service.chat_encoding import ASSISTANT, END_OF_THINKING, THINK
from router_service.reasoning import ReasoningSplitter
from tests.unit.router.chat_tokenizer import CONTROL, chat_tokenizer
from tests.unit.router.conftest import ServeRouter
from tests.unit.router.scripted_worker import Script, ScriptedWorker, finished, reserved, saying, tokens


def writing(token_ids: list[int], per_event: int = 1) -> Script:
    async def script(request: decode_pb2.GenerateRequest):
        yield reserved()
        for start in range(0, len(token_ids), per_event):
            yield tokens(token_ids[start : start + per_event], logprobs=request.sampling.HasField("logprobs"))
        yield finished(decode_pb2.FINISH_REASON_STOP)

    return script


async def test_a_chat_answers_with_a_message_and_counts_its_tokens(serve_router: ServeRouter):
    worker = ScriptedWorker(saying("4422"))
    router = await serve_router([worker])
    made = (await router.chat("fkaf?", max_tokens=9)).json()
    assert made["object"] == "chat.completion"
    assert made["id"].startswith("chatcmpl-")
    assert made["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "4422"}, "finish_reason": "length", "logprobs": None}
    ]
    assert (made["usage"]["prompt_tokens"], made["usage"]["completion_tokens"]) == (5, 4)
    assert bytes(token - 4 for token in worker.requests[0].token_ids) == b"fkaf?"
    assert worker.requests[0].sampling.max_tokens == 9


async def test_deltas_concatenate_to_the_message_and_the_role_comes_once(serve_router: ServeRouter):
    router = await serve_router([ScriptedWorker(saying("aé漢🙂z"))])
    whole = (await router.chat("x")).json()["choices"][0]["message"]["content"]
    chunks = await router.chat_events("x", stream_options={"include_usage": True})
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1]]
    assert "".join(d.get("content", "") for d in deltas) == whole == "aé漢🙂z"
    assert [d.get("role") for d in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [*[None] * (len(deltas) - 1), "length"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], len("aé漢🙂z".encode()))


async def test_reasoning_is_told_from_the_answer_streamed_or_not(serve_router: ServeRouter):
    tokenizer = chat_tokenizer()
    said = [*tokenizer.encode_plain("let me </thin"), CONTROL[END_OF_THINKING], *tokenizer.encode_plain("4!")]
    worker = ScriptedWorker(writing(said))
    router = await serve_router([worker], chat_tokens=True)
    message = (await router.chat("2+2?")).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "4!", "reasoning_content": "let me </thin"}
    deltas = [c["choices"][0]["delta"] for c in await router.chat_events("2+2?")]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "let me </thin"
    assert "".join(d.get("content", "") for d in deltas) == "4!"
    assert [worker.requests[0].token_ids[i] for i in (0, -2, -1)] == [0, CONTROL[ASSISTANT], CONTROL[THINK]]


async def test_thinking_can_be_refused_in_three_dialects(serve_router: ServeRouter):
    worker = ScriptedWorker(writing(chat_tokenizer().encode_plain("4")))
    router = await serve_router([worker], chat_tokens=True)
    for dialect in (
        {"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"thinking": False}},
    ):  # fmt: skip
        message = (await router.chat("2+2?", **dialect)).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "4"}
        assert worker.requests[-1].token_ids[-1] == CONTROL[END_OF_THINKING]
    await router.chat("2+2?", reasoning_effort="max")
    assert "Absolute maximum" in decode(chat_tokenizer(), list(worker.requests[-1].token_ids))


async def test_reasoning_that_never_ends_is_all_reasoning(serve_router: ServeRouter):
    router = await serve_router([ScriptedWorker(writing(chat_tokenizer().encode_plain("hm </th")))], chat_tokens=True)
    message = (await router.chat("x")).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "", "reasoning_content": "hm </th"}


@given(st.text("</think>a", max_size=30), st.lists(st.integers(0, 30), max_size=8))
def test_reasoning_ends_at_its_mark_wherever_the_text_is_cut(text: str, cuts: list[int]):
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    splitter = ReasoningSplitter("</think>", thinks=True)
    pairs = [splitter.push(text[a:b]) for a, b in itertools.pairwise(places)]
    reasoning = "".join(r for r, _ in pairs) + splitter.finish()
    before, _, after = text.partition("</think>")
    assert (reasoning, "".join(answer for _, answer in pairs)) == (before, after)


async def test_chat_logprobs_name_each_token_with_its_bytes(serve_router: ServeRouter):
    router = await serve_router([ScriptedWorker(saying("é"))])
    found = (await router.chat("x", logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in found] == [[0xC3], [0xA9]]
    assert [entry["token"] for entry in found] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] < 0 for entry in found)
    chunks = await router.chat_events("x", logprobs=True, top_logprobs=1)
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert streamed == found
    assert (await router.chat("x")).json()["choices"][0]["logprobs"] is None


async def test_chat_parameters_reach_the_worker(serve_router: ServeRouter):
    worker = ScriptedWorker()
    router = await serve_router([worker])
    await router.chat("x", max_completion_tokens=7, top_logprobs=3, logprobs=True, stop="S", seed=4, n=2, priority=1)
    first, second = sorted(worker.requests, key=lambda r: r.request_id)
    assert (first.sampling.max_tokens, first.sampling.logprobs) == (7, 3)
    assert (first.sampling.seed, second.sampling.seed, first.priority) == (4, 5, 1)


async def test_without_a_limit_the_output_is_bounded_by_the_context(serve_router: ServeRouter):
    worker = ScriptedWorker()
    router = await serve_router([worker])
    await router.chat("x")
    await router.chat("x" * 4000)
    assert [r.sampling.max_tokens for r in worker.requests] == [2048, 96]


USER: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"messages": USER, "max_tokens": 5000}, "max_tokens"),
    ({"messages": USER, "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"messages": USER, "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"messages": USER, "prompt": "x"}, "prompt"),
    ({"messages": USER, "echo": True}, "echo"),
    ({"messages": USER, "logprobs": 1}, "logprobs"),
    ({"messages": USER, "top_logprobs": 1}, "top_logprobs"),
    ({"messages": USER, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ({"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": USER, "reasoning_effort": "high"}, "reasoning_effort"),
    ({"messages": USER, "reasoning_effort": "huge"}, "reasoning_effort"),
    ({"messages": USER, "reasoning_effort": "none", "thinking": {"type": "enabled"}}, "reasoning_effort"),
    ({"messages": USER, "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ({"messages": USER, "stop": [""]}, "stop"),
    ({"messages": USER, "n": 0}, "n"),
]


async def test_a_bad_chat_is_400_by_name_twice_reaches_no_worker_and_the_next_one_works(serve_router: ServeRouter):
    worker = ScriptedWorker()
    router = await serve_router([worker])
    for body, param in BAD:
        for _ in range(2):
            answer = await router.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400, body
            error = answer.json()["error"]
            assert (error["param"], error["type"]) == (param, "invalid_request_error")
            assert param.rpartition(".")[2] in error["message"]
        assert worker.requests == []
        assert router.state.in_flight == 0
        assert (await router.chat("x")).status_code == 200
        worker.requests.clear()
