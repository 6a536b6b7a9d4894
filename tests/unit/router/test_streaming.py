"""What clients read: events, deltas, log probabilities, choices, echo."""

import asyncio
from collections.abc import AsyncIterator

from common.rpc.gen.dsv4pd.v1 import decode_pb2
from tests.unit.router.conftest import ServeRouter
from tests.unit.router.scripted_worker import Event, ScriptedWorker, finished, reserved, saying, tokens


async def test_a_character_split_over_events_is_never_shown_broken(serve_router: ServeRouter):
    router = await serve_router([ScriptedWorker(saying("aé漢🙂z"))])
    texts = [c["choices"][0]["text"] for c in await router.events(prompt="x")]
    assert "".join(texts) == "aé漢🙂z"
    assert not any("\ufffd" in text for text in texts)
    assert (await router.post(prompt="x")).json()["choices"][0]["text"] == "aé漢🙂z"


async def test_a_stop_string_across_events_is_held_back_and_the_worker_is_told_to_end(serve_router: ServeRouter):
    async def endless(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        for byte in b"one STOP two":
            yield tokens([byte + 4])
        await asyncio.sleep(60)

    worker = ScriptedWorker(endless)
    router = await serve_router([worker])
    chunks = await router.events(prompt="x", stop=["STOP"])
    texts = [c["choices"][0]["text"] for c in chunks]
    assert "".join(texts) == "one "
    assert not any("S" in text for text in texts)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    whole = (await router.post(prompt="x", stop="STOP")).json()
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == ("one ", "stop")
    # Counted as made: the tokens up to the one that completed the stop string.
    assert whole["usage"]["completion_tokens"] == len("one STOP")
    async with asyncio.timeout(1):
        while worker.running:
            await asyncio.sleep(0.005)
    assert worker.cancelled == 2


async def test_the_ending_token_is_counted_and_not_shown(serve_router: ServeRouter):
    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        yield tokens([4 + ord("a"), 1])
        yield finished(decode_pb2.FINISH_REASON_STOP, stop_token_id=1)

    router = await serve_router([ScriptedWorker(script)])
    made = (await router.post(prompt="x", skip_special_tokens=False)).json()
    assert (made["choices"][0]["text"], made["choices"][0]["finish_reason"]) == ("a", "stop")
    assert made["usage"]["completion_tokens"] == 2


async def test_an_end_of_sequence_as_the_first_token_ends_at_once(serve_router: ServeRouter):
    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        yield tokens([1])
        yield finished(decode_pb2.FINISH_REASON_STOP, stop_token_id=1)

    router = await serve_router([ScriptedWorker(script)])
    chunks = await router.events(prompt="x")
    assert "".join(c["choices"][0]["text"] for c in chunks) == ""
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_usage_is_in_a_chunk_of_its_own_and_only_when_asked_for(serve_router: ServeRouter):
    router = await serve_router([ScriptedWorker(saying("abc"))])
    assert all("usage" not in c for c in await router.events(prompt="hello"))
    chunks = await router.events(prompt="hello", stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert {k: v for k, v in chunks[-1]["usage"].items() if k.endswith("_tokens")} == {
        "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8,
    }  # fmt: skip
    assert all(c["usage"] is None for c in chunks[:-1])
    both = {"include_usage": True, "continuous_usage_stats": True}
    running = await router.events(prompt="hello", stream_options=both)
    assert [c["usage"]["completion_tokens"] for c in running] == [1, 2, 3, 3, 3]


async def test_streamed_logprobs_are_those_of_the_answer_at_once(serve_router: ServeRouter):
    """Also where text is held back, and where a token is part of a character: offsets count tokens' spellings."""
    router = await serve_router([ScriptedWorker(saying("aSTé-end"))])
    for echo in (False, True):
        body = {"prompt": "pq", "logprobs": 1, "echo": echo, "stop": ["STOP"]}
        whole = (await router.post(**body)).json()["choices"][0]["logprobs"]
        joined: dict[str, list[object]] = {name: [] for name in whole}
        for chunk in await router.events(**body):
            for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
                joined[name] += values
        assert joined == whole
        first = 2 if echo else 0
        assert whole["tokens"][first : first + 3] == ["a", "S", "T"]
        assert whole["text_offset"][: first + 3] == list(range(first + 3))
        assert whole["tokens"][first + 3] == "bytes:\\xc3"
        if echo:
            assert whole["token_logprobs"][0] is None
            assert whole["top_logprobs"][0] is None
            assert abs(whole["token_logprobs"][1] + (4 + ord("q")) / 100) < 1e-6


async def test_echo_comes_once_before_the_first_delta(serve_router: ServeRouter):
    router = await serve_router([ScriptedWorker(saying("out"))])
    chunks = await router.events(prompt="in ", echo=True)
    assert chunks[0]["choices"][0]["text"] == "in o"
    assert "".join(c["choices"][0]["text"] for c in chunks) == "in out"


async def test_token_ids_come_when_asked_for_and_the_prompts_once(serve_router: ServeRouter):
    router = await serve_router([ScriptedWorker(saying("ab"))])
    chunks = [c["choices"][0] for c in await router.events(prompt=[70, 71], return_token_ids=True)]
    assert [token for c in chunks for token in c["token_ids"]] == [101, 102]
    assert [c.get("prompt_token_ids") for c in chunks] == [[70, 71], *[None] * (len(chunks) - 1)]
    whole = (await router.post(prompt=[70, 71], return_token_ids=True)).json()["choices"][0]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == ([70, 71], [101, 102])
    assert "token_ids" not in (await router.post(prompt="x")).json()["choices"][0]


async def test_every_choice_is_a_call_with_its_own_id_index_and_seed(serve_router: ServeRouter):
    worker = ScriptedWorker(saying("t"))
    router = await serve_router([worker])
    made = (await router.post(prompt=["a", "bc"], n=2, seed=2**63 - 1, temperature=0.5)).json()
    assert [c["index"] for c in made["choices"]] == [0, 1, 2, 3]
    asked = sorted(worker.requests, key=lambda r: r.request_id)
    assert len({r.request_id for r in asked}) == 4
    assert [r.sampling.seed for r in asked] == [2**63 - 1, 2**63] * 2
    assert [list(r.token_ids) for r in asked] == [[101]] * 2 + [[102, 103]] * 2
    assert made["usage"]["prompt_tokens"] == 3


async def test_parameters_reach_the_worker(serve_router: ServeRouter):
    worker = ScriptedWorker()
    router = await serve_router([worker])
    answer = await router.post(
        prompt="x", max_tokens=7, min_tokens=2, temperature=0.5, top_p=0.25, top_k=9, min_p=0.125, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=2, logit_bias={"5": -100}, stop_token_ids=[8], ignore_eos=True,
        logprobs=0, priority=-3, user="u",
    )  # fmt: skip
    # The script sends no alternatives; what matters here is what was asked.
    assert answer.status_code == 200
    (asked,) = worker.requests
    s = asked.sampling
    assert (s.max_tokens, s.min_tokens, s.temperature, s.top_p, s.top_k, s.min_p) == (7, 2, 0.5, 0.25, 9, 0.125)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1, -1, 2)
    assert (dict(s.logit_bias), list(s.stop_token_ids), s.ignore_eos, s.logprobs) == ({5: -100}, [8], True, 0)
    assert s.HasField("logprobs")
    assert not s.HasField("seed")
    assert not s.HasField("prompt_logprobs")
    assert asked.priority == -3
    assert asked.prefill_address == router.state.workers.prefill[0].address


async def test_defaults_are_openais(serve_router: ServeRouter):
    worker = ScriptedWorker()
    router = await serve_router([worker])
    await router.post(prompt="x", top_k=-1)
    s = worker.requests[0].sampling
    assert (s.max_tokens, s.temperature, s.top_p, s.top_k, s.repetition_penalty) == (16, 1, 1, 0, 1)
