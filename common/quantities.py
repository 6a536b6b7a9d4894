"""Numbers as people write them: 1TB, 128GiB, 1m, 256k."""

from __future__ import annotations

import re

_BYTES = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024), ("", 1000))
}
_TOKENS = {"": 1, "k": 1024, "m": 1 << 20}


def parse_bytes(text: str) -> int:
    """ "8GiB", "1TB" (powers of 1 000), "4096". Raises ValueError that names the text."""
    return _parse(text, _BYTES, "bytes, such as 8GiB or 1TB")


def parse_tokens(text: str) -> int:
    """ "256k" and "1m" (powers of 1 024), "8000". Raises ValueError."""
    return _parse(text, _TOKENS, "tokens, such as 256k or 1m")


def show_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def show_tokens(count: int) -> str:
    for unit, size in (("m", 1 << 20), ("k", 1024)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def _parse(text: str, units: dict[str, int], what: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is no number of {what}")
    return int(float(match[1]) * units[match[2].lower()])
