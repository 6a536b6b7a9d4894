"""From a worker's events to text: whatever bytes, events and stop strings, streamed or not, it is the same text."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from common.model.tokenizer import ByteTokenizer
from common.rpc.gen.dsv4pd.v1 import common_pb2, decode_pb2
from router_service.answers import TextAnswers
from router_service.generate import Choice, Piece, pieces_of
from router_service.generation import text_generation
from router_service.protocol import CompletionRequest
from tests.unit.router.scripted_worker import OFFSET, Event, finished, reserved, tokens

CONFIG = ModelConfig.from_dict(small_config())
TOKENIZER = ByteTokenizer(CONFIG)
EOS = CONFIG.eos_token_id[0]
# Few letters, so that stop strings occur; the parts of a two-byte and of a four-byte character; a byte that is none.
BYTES = st.lists(st.sampled_from([*b"ab", 0xC3, 0xA9, *"🙂".encode(), 0xFF]), max_size=24).map(bytes)
STOPS = st.lists(st.text("abé🙂\ufffd", min_size=1, max_size=4), max_size=3)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=24)


def pieces(content: bytes, sizes: Sequence[int], stops: list[str], *, eos: bool = False) -> list[Piece]:
    """Of a worker that makes one token a byte, so many at a time."""
    ids = [byte + OFFSET for byte in content] + ([EOS] if eos else [])

    async def events() -> AsyncIterator[Event]:
        start = 0
        for place in range(len(ids)):
            if start >= len(ids):
                break
            end = start + sizes[place % len(sizes)]
            yield tokens(ids[start:end])
            start = end
        yield finished(decode_pb2.FINISH_REASON_STOP if eos else decode_pb2.FINISH_REASON_LENGTH)

    choice = Choice(
        0, "r", [70], common_pb2.SamplingParams(max_tokens=max(1, len(ids))), stops, frozenset({EOS}), True, 0, 1, 1, "t",
    )  # fmt: skip

    async def collect() -> list[Piece]:
        return [piece async for piece in pieces_of(choice, reserved(), events(), TOKENIZER)]

    return asyncio.run(collect())


def expected(content: bytes, stops: list[str]) -> tuple[str, bool, int]:
    """Text, whether a stop string ended it, and tokens used; by looking at the whole text after each byte."""
    for end in range(1, len(content) + 1):
        text = _complete_part(content[:end])
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            return text[: min(places)], True, end
    text = content.decode("utf-8", errors="replace")
    places = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(places)], True, len(content)) if places else (text, False, len(content))


def _complete_part(content: bytes) -> str:
    """The text of the longest beginning that any continuation leaves as it is."""
    for end in range(len(content), -1, -1):
        text = content[:end].decode("utf-8", errors="replace")
        rest = content[end:]
        if all((content[:end] + rest + more).decode("utf-8", errors="replace").startswith(text) for more in MORE):
            return text
    return ""


MORE = [b"", b"a", b"\x80", b"\x9f", b"\xa9", b"\x9f\x99", b"\x9f\x99\x82", b"\x99\x82", b"\x82"]


@given(BYTES, SIZES, STOPS)
def test_deltas_concatenate_to_the_text_before_the_first_stop_string_however_events_are_cut(
    content: bytes, sizes: list[int], stops: list[str]
):
    made = pieces(content, sizes, stops)
    text, stopped, used = expected(content, stops)
    assert "".join(piece.text for piece in made) == text
    assert [piece.finish_reason for piece in made] == [*[None] * (len(made) - 1), "stop" if stopped else "length"]
    assert sum(len(piece.token_ids) for piece in made) == used


@given(BYTES, SIZES, STOPS)
def test_no_part_of_a_stop_string_that_ends_the_text_is_ever_shown(content: bytes, sizes: list[int], stops: list[str]):
    shown = ""
    for piece in pieces(content, sizes, stops):
        shown += piece.text
        assert not any(stop in shown for stop in stops)
    text, stopped, _ = expected(content, stops)
    assert not stopped or shown == text


@given(st.text("aé漢🙂", max_size=12), SIZES)
def test_a_split_character_never_leaks_a_replacement_into_any_delta(text: str, sizes: list[int]):
    assert not any("\ufffd" in piece.text for piece in pieces(text.encode(), sizes, []))


@given(BYTES, SIZES, STOPS, st.booleans())
def test_the_streamed_object_is_the_whole_one_in_text_tokens_and_usage(
    content: bytes, sizes: list[int], stops: list[str], echo: bool
):
    body = CompletionRequest(prompt="pq", echo=echo, return_token_ids=True, stream=True, stop=stops)  # type: ignore[call-arg]

    def answers() -> TextAnswers:
        return TextAnswers(text_generation(body, TOKENIZER, CONFIG.vocab_size), body, "m", TOKENIZER)

    made = pieces(content, sizes, stops, eos=True)
    at_once, streamed = answers(), answers()
    for piece in made:
        at_once.add(piece)
    whole = at_once.whole()
    chunks: list[Any] = [streamed.chunk(piece)["choices"][0] for piece in made]
    choice = whole["choices"][0]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == choice["token_ids"]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert whole["usage"]["total_tokens"] == 2 + len(choice["token_ids"])
    assert choice["text"].startswith("pq") or not echo


def test_an_end_of_sequence_counts_as_a_token_and_shows_nothing():
    made = pieces(b"", [1], [], eos=True)
    assert ["".join(piece.text for piece in made), made[-1].finish_reason] == ["", "stop"]
    assert [token for piece in made for token in piece.token_ids] == [EOS]
