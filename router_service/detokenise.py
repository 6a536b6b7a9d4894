"""Tokens to text while they come: no broken characters, no stop string ever shown.

Deltas concatenated are exactly the text that the tokens give at once: bytes go through one incremental UTF-8
decoder, which keeps an unfinished character back until it is whole (or, at the end, replaces it).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from common.model.tokenizer import Tokenizer


class IncrementalDetokeniser:
    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""
        if self._tokenizer.is_special(token_id):
            content = b"" if self._skip else self._tokenizer.token_text(token_id).encode()
        else:
            content = self._tokenizer.id_to_bytes(token_id)
        return self._decoder.decode(content)

    def finish(self) -> str:
        """What was kept back: an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopFinder:
    """Finds the first stop string in a text that comes in pieces; keeps back what could still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string was found right behind it."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was kept back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins (not all of it)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
