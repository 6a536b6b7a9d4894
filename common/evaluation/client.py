"""Asks many questions over HTTP, some at a time, and measures how the answers came."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Reply:
    """`first_token_s` from sending to the first text, `tokens` as the server counted them."""

    text: str
    first_token_s: float
    total_s: float
    tokens: int


@dataclass(frozen=True)
class Proportion:
    """`right` of `total`, with the 95 % Wilson interval."""

    right: int
    total: int

    @property
    def value(self) -> float:
        return self.right / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        if not self.total:
            return 0.0, 1.0
        z, n, p = 1.959964, self.total, self.value
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)


async def ask_all(
    url: str, bodies: Sequence[dict[str, Any]], concurrency: int, on_reply: Callable[[int, Reply], None]
) -> list[Reply]:
    """Sends every body to {url}/v1/completions as a stream, `concurrency` at a time; replies in order.

    Raises RuntimeError with the server's message for an answer that is no completion.
    """
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(600), limits=limits) as client:

        async def one(index: int, body: dict[str, Any]) -> Reply:
            async with gate:
                reply = await _ask(client, body)
                on_reply(index, reply)
                return reply

        return list(await asyncio.gather(*(one(index, body) for index, body in enumerate(bodies))))


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Reply:
    begun = time.monotonic()
    first, text, tokens = 0.0, "", 0
    streaming = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=streaming) as response:
        if response.status_code != 200:
            content = (await response.aread()).decode(errors="replace")
            raise RuntimeError(f"HTTP {response.status_code}: {content[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"the stream failed: {event['error']['message']}")
            for choice in event["choices"]:
                first = first or time.monotonic() - begun
                text += choice["text"]
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return Reply(text, first, time.monotonic() - begun, tokens)
