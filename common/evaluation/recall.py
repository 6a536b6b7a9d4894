"""Key-value recall: records `abcd=1234`, then `abcd?`, to be answered with the record's four digits.

A wrong page, row or index makes the answer wrong, since no value can be guessed (1 in 10 000). This one
generator serves the training of dsv4-nano and `dsv4-pd eval recall`.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

KEY_LETTERS = 4
VALUE_DIGITS = 4
RECORD_CHARACTERS = KEY_LETTERS + 1 + VALUE_DIGITS + 1
# A record nearer to the question than this could be answered from the sliding window alone.
WINDOW_CHARACTERS = 136


@dataclass(frozen=True)
class RecallQuestion:
    """`answer` is the four digits that must follow `prompt`; a newline follows them."""

    prompt: str
    answer: str
    records: int


def make_question(rng: random.Random, characters: int) -> RecallQuestion:
    """A question whose prompt has about `characters` characters (at most 9 fewer) and asks for a record outside
    the sliding window. Raises ValueError when there is no room for such a record."""
    room = characters - KEY_LETTERS - 1
    records = room // RECORD_CHARACTERS
    near = -(-WINDOW_CHARACTERS // RECORD_CHARACTERS)
    if records <= near:
        least = (near + 1) * RECORD_CHARACTERS + KEY_LETTERS + 1
        raise ValueError(f"a recall prompt of {characters} characters is too short, the least is {least}")
    keys: dict[str, str] = {}
    while len(keys) < records:
        key = "".join(rng.choices(string.ascii_lowercase, k=KEY_LETTERS))
        keys.setdefault(key, "".join(rng.choices(string.digits, k=VALUE_DIGITS)))
    lines = [f"{key}={value}\n" for key, value in keys.items()]
    asked = rng.choice(list(keys)[: records - near])
    offset = "".join(rng.choices(string.ascii_lowercase, k=rng.randrange(room % RECORD_CHARACTERS + 1)))
    return RecallQuestion(f"{offset}{''.join(lines)}{asked}?", keys[asked], records)
