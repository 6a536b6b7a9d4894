"""Lists of "host:port" in settings and messages."""

from __future__ import annotations


def is_address(text: str) -> bool:
    """Whether it is "host:port" with a port that can be connected to."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16


def parse_addresses(setting: str, text: str) -> tuple[str, ...]:
    """The addresses of a comma separated list. Raises ValueError that names the setting and what is none."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in found:
        if not is_address(address):
            raise ValueError(f"{setting} = {text!r}: {address!r} is not host:port")
    return found
