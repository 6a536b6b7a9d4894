"""Sends completions at a rate or with so many at a time, and notes when every piece of text came."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

REQUEST_TIMEOUT_S = 600.0
Metric = tuple[str, float]


@dataclass(frozen=True)
class Sample:
    """One request, times in seconds. `begun_s` from the start of the load; `ttft_s` to its first text, `gaps_s` between
    pieces of text, `total_s` to its end; `tokens` as the server counted them; `error` is empty when it went well."""

    begun_s: float
    ttft_s: float
    gaps_s: tuple[float, ...]
    total_s: float
    tokens: int
    error: str


@dataclass(frozen=True)
class Load:
    """`kind` "closed": `level` requests at a time; "open": arrivals at random, `level` a second on average."""

    kind: Literal["closed", "open"]
    level: float
    requests: int
    seed: int = 0

    def arrivals(self) -> list[float]:
        """Seconds at which requests are sent; all 0 when closed."""
        if self.kind == "closed":
            return [0.0] * self.requests
        rng = random.Random(self.seed)  # noqa: S311 - arrivals, not secrets
        now, found = 0.0, list[float]()
        for _ in range(self.requests):
            found.append(now)
            now += rng.expovariate(self.level)
        return found


async def run_load(
    url: str, load: Load, bodies: Sequence[dict[str, Any]], headers: dict[str, str], on_sample: Callable[[Sample], None]
) -> list[Sample]:
    """Sends every body to {url}/v1/completions as a stream. Failed requests are samples too."""
    gate = asyncio.Semaphore(int(load.level) if load.kind == "closed" else len(bodies) or 1)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    start = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits, headers=headers) as client:

        async def one(due_s: float, body: dict[str, Any]) -> Sample:
            await asyncio.sleep(max(0.0, start + due_s - time.monotonic()))
            async with gate:
                sample = await _ask(client, body, start)
            on_sample(sample)
            return sample

        return list(await asyncio.gather(*map(one, load.arrivals(), bodies)))


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], start: float) -> Sample:
    begun = time.monotonic()
    came: list[float] = []
    tokens, error = 0, ""
    streaming = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", "/v1/completions", json=streaming) as response:
            if response.status_code != 200:
                content = (await response.aread()).decode(errors="replace")
                error = f"HTTP {response.status_code}: {content[:200]}"
            else:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        error = event["error"]["message"]
                        break
                    if any(choice["text"] for choice in event["choices"]):
                        came.append(time.monotonic())
                    if event.get("usage"):
                        tokens = event["usage"]["completion_tokens"]
    except (httpx.HTTPError, OSError) as cause:
        error = f"{type(cause).__name__}: {cause}"
    end = time.monotonic()
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(came))
    return Sample(begun - start, (came[0] if came else end) - begun, gaps, end - begun, tokens, error)


async def watch_metrics(urls: Sequence[str], interval_s: float, seen: list[tuple[float, list[Metric]]]) -> None:
    """Appends (seconds, pool occupancy in pages by pool) until cancelled, from workers' /metrics. An address that does
    not answer is left out of a line."""
    start = time.monotonic()
    async with httpx.AsyncClient(timeout=5.0) as client:
        while True:
            used: dict[str, float] = {}
            for url in urls:
                try:
                    text = (await client.get(f"{url}/metrics")).text
                except (httpx.HTTPError, OSError):
                    continue
                for pool, pages in pool_pages(text):
                    used[pool] = used.get(pool, 0.0) + pages
            seen.append((time.monotonic() - start, sorted(used.items())))
            await asyncio.sleep(interval_s)


def pool_pages(text: str) -> list[Metric]:
    """Used pages by pool in Prometheus text of a decode worker."""
    found: list[Metric] = []
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("dsv4pd_decode_pool_pages{") and 'state="used"' in name:
            found.append((name.split('pool="')[1].split('"')[0], float(value)))
    return found
