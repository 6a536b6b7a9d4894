"""Detokenising and stop strings: whatever the cuts, the deltas are the text and no stop string shows."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from common.model.tokenizer import ByteTokenizer
from router_service.detokenise import IncrementalDetokeniser, StopFinder

TOKENIZER = ByteTokenizer(ModelConfig.from_dict(small_config()))


def deltas(token_ids: list[int], skip: bool = True) -> list[str]:
    detokeniser = IncrementalDetokeniser(TOKENIZER, skip_special_tokens=skip)
    return [detokeniser.push(token) for token in token_ids] + [detokeniser.finish()]


@given(st.lists(st.integers(4, 259), max_size=60))
def test_deltas_of_any_bytes_concatenate_to_the_text_at_once(token_ids: list[int]):
    whole = bytes(token - 4 for token in token_ids).decode("utf-8", errors="replace")
    assert "".join(deltas(token_ids)) == whole


@given(st.text(max_size=30))
def test_no_replacement_character_leaks_into_a_split_character(text: str):
    text = text.encode("utf-8", "ignore").decode().replace("\ufffd", "")
    assert "\ufffd" not in "".join(deltas(TOKENIZER.encode(text)))
    assert "".join(deltas(TOKENIZER.encode(text))) == text


def test_an_unfinished_character_at_the_end_is_replaced_once():
    assert deltas([4 + 0xF0, 4 + 0x9F]) == ["", "", "\ufffd"]


def test_special_tokens_show_only_when_asked():
    assert deltas([4 + 65, 1, 4 + 66]) == ["A", "", "B", ""]
    assert deltas([4 + 65, 1, 4 + 66], skip=False) == ["A", "<eos>", "B", ""]


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    finder = StopFinder(stops)
    shown = ""
    for piece in pieces:
        text, stopped = finder.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + finder.finish(), False


@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 24), max_size=8),
)
def test_stop_strings_are_found_wherever_the_text_is_cut(text: str, stops: list[str], cuts: list[int]):
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    shown, stopped = run(pieces, stops)
    found = [text.find(stop) for stop in stops if stop in text]
    assert stopped == bool(found)
    if found:
        # A stop string that is complete earlier ends the text, even if a longer one began before it.
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)
        assert len(shown) <= min(ends)
    else:
        assert shown == text


@given(st.text("ab", max_size=20), st.text("ab", min_size=1, max_size=4))
def test_one_character_at_a_time_shows_exactly_what_precedes_the_stop(text: str, stop: str):
    shown, stopped = run(list(text), [stop])
    place = text.find(stop)
    assert (shown, stopped) == ((text, False) if place < 0 else (text[:place], True))


def test_text_that_could_become_a_stop_is_held_back_and_then_shown():
    finder = StopFinder(["STOP"])
    assert finder.push("xST") == ("x", False)
    assert finder.push("O") == ("", False)
    assert finder.push("p") == ("STOp", False)
    assert finder.push("ST") == ("", False)
    assert finder.finish() == "ST"
