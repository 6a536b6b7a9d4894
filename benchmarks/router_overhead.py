"""What the router adds to a token's way, and whether its memory stays flat.

A worker that computes nothing (benchmarks/instant_worker.py) sends tokens over the real gRPC contract and notes when; a
client notes when each arrives. The same streams once straight over gRPC and once through the router: the difference
of the percentiles is what the router adds. All three processes share the machine's cores; where other jobs want them
too, `chrt -r 1` (root) lets these go first, which `nice` does not across sessions.

    chrt -r 1 python benchmarks/router_overhead.py --out benchmarks/results/router_overhead.txt
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import numpy as np
import psutil

from common.model.small_checkpoint import small_config
from common.rpc.channels import open_channel
from common.rpc.gen.dsv4pd.v1 import common_pb2, decode_pb2

ROOT = Path(__file__).resolve().parent.parent
AIM_P50_MS, AIM_P99_MS = 2.0, 10.0
STARTS_A_SECOND = 40
SETTLE_S = 3.0
ID = re.compile(rb'"id":"(cmpl-[0-9a-f]+)"')


@dataclass(frozen=True)
class Latencies:
    """Milliseconds from a worker's send to the client's receipt, and the share of a core that each process took."""

    ms: np.ndarray
    tokens_s: float
    cores: dict[str, float]

    def at(self, percentile: float) -> float:
        return float(np.percentile(self.ms, percentile))


class Process:
    """A child with a port file."""

    def __init__(self, name: str, folder: Path, *command: str) -> None:
        self.name = name
        self.port_file = folder / f"{name}.port"
        self.port_file.unlink(missing_ok=True)
        with (folder / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, cwd=ROOT)
        end = time.monotonic() + 30
        while not self.port_file.exists() or not self.port_file.read_text():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{name} did not start: {(folder / f'{name}.log').read_text()[-2000:]}")
            time.sleep(0.02)
        self.address = self.port_file.read_text()
        self.ps = psutil.Process(self.process.pid)

    def cpu_s(self) -> float:
        times = self.ps.cpu_times()
        return times.user + times.system

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


class System:
    """A worker and, before it, a router."""

    def __init__(self, folder: Path, rate: float) -> None:
        (folder / "config.json").write_text(json.dumps(small_config()))
        self._times = folder / "times.json"
        self.worker = Process(
            "worker", folder, "benchmarks/instant_worker.py", str(rate), str(folder / "worker.port"), str(self._times)
        )
        flags = ["--port", "0", "--port-file", str(folder / "router.port"), "--max-in-flight", "4096"]
        flags += ["--max-dispatched", "4096", "--log-level", "warning", "--drain-timeout-s", "1"]
        workers = ["--prefill", self.worker.address, "--decode", self.worker.address]
        self.router = Process("router", folder, "-m", "router_service", "--model", str(folder), *workers, *flags)

    def stop(self) -> dict[str, list[int]]:
        """When the worker sent each token, by request id, in nanoseconds of the monotonic clock."""
        self.router.stop()
        self.worker.stop()
        return json.loads(self._times.read_text())


@dataclass
class Stream:
    """What one client saw: for every token, when it came."""

    request_id: str
    arrived: list[int]


class Reader(asyncio.Protocol):
    """Posts one streaming completion and notes the time of every event; parses no more than it must."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self._request = request
        self._stream = Stream("", [])
        self._head = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if not self._stream.request_id:
            self._head += data
            found = ID.search(self._head)
            if found is None:
                return
            self._stream.request_id = f"{found[1].decode()}-0"
            data = self._head
        # One character a token; the last event has none and ends the text.
        self._stream.arrived += [now] * data.count(b'"text":"B"')
        if b"[DONE]" in data:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(self._stream)


async def through_router(address: str, tokens: int, number: int) -> Stream:
    host, _, port = address.rpartition(":")
    body = json.dumps({"prompt": f"a short prompt {number}", "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
    _, reader = await asyncio.get_running_loop().create_connection(lambda: Reader(request), host, int(port))
    return await reader.done


def straight(channel: grpc.aio.Channel) -> Callable[[str, int, int], Coroutine[Any, Any, Stream]]:
    generate = channel.unary_stream("/dsv4pd.v1.Decode/Generate", decode_pb2.GenerateRequest.SerializeToString, bytes)

    async def run(address: str, tokens: int, number: int) -> Stream:
        sampling = common_pb2.SamplingParams(max_tokens=tokens)
        request = decode_pb2.GenerateRequest(request_id=f"direct-{number}", token_ids=[70] * 20, sampling=sampling)
        stream = Stream(request.request_id, [])
        async for message in generate(request):
            stream.arrived.append(time.monotonic_ns())
            last = message
        del last, stream.arrived[0], stream.arrived[-1]  # Reserved and Finished
        return stream

    return run


async def measure(
    run: Callable[[str, int, int], Coroutine[Any, Any, Stream]], address: str, streams: int, tokens: int, seconds: float
) -> list[Stream]:
    """All streams at once, begun one after the other so that their tokens are spread."""

    async def one(number: int) -> Stream:
        await asyncio.sleep(number / STARTS_A_SECOND)
        return await run(address, tokens, number)

    return await asyncio.gather(*(one(number) for number in range(streams)))


def latencies(found: list[Stream], sent: dict[str, list[int]], tokens: int) -> np.ndarray:
    """Of the tokens sent while all streams ran, some seconds after the last began. Raises ValueError when one is
    missing."""
    begun_ns = max(sent[stream.request_id][0] for stream in found) + int(SETTLE_S * 1e9)
    ended_ns = min(sent[stream.request_id][-1] for stream in found)
    all_ms: list[np.ndarray] = []
    for stream in found:
        times = np.array(sent[stream.request_id])
        if len(stream.arrived) != tokens or len(times) != tokens:
            raise ValueError(f"{stream.request_id}: {len(times)} tokens sent, {len(stream.arrived)} came")
        steady = (times > begun_ns) & (times < ended_ns)
        all_ms.append((np.array(stream.arrived)[steady] - times[steady]) / 1e6)
    return np.concatenate(all_ms)


def run_streams(folder: Path, streams: int, rate: float, seconds: float, *, router: bool) -> Latencies:
    folder.mkdir(parents=True, exist_ok=True)
    system = System(folder, rate)
    tokens = int(rate * (seconds + SETTLE_S + streams / STARTS_A_SECOND))
    watched = {"worker": system.worker, "router": system.router}
    own = psutil.Process()

    async def go() -> tuple[list[Stream], float, dict[str, float]]:
        async with open_channel(system.worker.address) as channel:
            run, address = (through_router, system.router.address) if router else (straight(channel), "")
            before = {name: process.cpu_s() for name, process in watched.items()}
            mine, begun = sum(own.cpu_times()[:2]), time.monotonic()
            found = await measure(run, address, streams, tokens, seconds)
            took = time.monotonic() - begun
            cores = {name: (process.cpu_s() - before[name]) / took for name, process in watched.items()}
            cores["client"] = (sum(own.cpu_times()[:2]) - mine) / took
            return found, took, cores

    found, took, cores = asyncio.run(go())
    ms = latencies(found, system.stop(), tokens)
    return Latencies(ms, streams * tokens / took, cores)


def run_memory(folder: Path, requests: int, at_once: int = 32, tokens: int = 8) -> list[tuple[int, float]]:
    """Resident memory of the router in MiB after so many requests, half of them streams."""
    folder.mkdir(parents=True, exist_ok=True)
    system = System(folder, 0)
    sizes: list[tuple[int, float]] = []
    url = f"http://{system.router.address}/v1/completions"

    async def go() -> None:
        limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:

            async def ask(number: int) -> None:
                body = {"prompt": f"prompt {number}", "max_tokens": tokens, "stream": number % 2 == 0}
                answer = await client.post(url, json=body)
                if answer.status_code != 200:
                    raise RuntimeError(f"{answer.status_code}: {answer.text}")

            step = max(requests // 10, 1)
            for start in range(0, requests, step):
                numbers = iter(range(start, min(start + step, requests)))

                async def lane(numbers: Any = numbers) -> None:
                    for number in numbers:
                        await ask(number)

                await asyncio.gather(*(lane() for _ in range(at_once)))
                sizes.append((start + step, system.router.ps.memory_info().rss / 2**20))

    asyncio.run(go())
    system.stop()
    return sizes


def compare(folder: Path, streams: int, rate: float, seconds: float) -> list[str]:
    """Both ways at one load, as lines."""
    direct = run_streams(folder / f"direct{streams}", streams, rate, seconds, router=False)
    routed = run_streams(folder / f"routed{streams}", streams, rate, seconds, router=True)
    lines: list[str] = []
    for name, found in (("straight over gRPC", direct), ("through the router", routed)):
        shares = ", ".join(f"{k} {v:.2f}" for k, v in found.cores.items())
        row = "".join(f"{found.at(p):9.2f}" for p in (50, 90, 99))
        lines.append(f"{streams:>4} {name:<20}{row}{found.at(100):9.2f}{found.tokens_s:10.0f}   {shares}")
    p50, p99 = routed.at(50) - direct.at(50), routed.at(99) - direct.at(99)
    met = "met" if p50 <= AIM_P50_MS and p99 <= AIM_P99_MS else "missed"
    cost = routed.cores["router"] / routed.tokens_s * 1e6
    lines.append(
        f"     the router adds p50 {p50:.2f} ms, p99 {p99:.2f} ms: {met}; it takes {cost:.0f} us of CPU a token"
    )
    return lines


def report(loads: list[int], rate: float, seconds: float, requests: int) -> str:
    versions = f"Python {platform.python_version()}, grpcio {grpc.__version__}"
    lines = [f"{os.cpu_count()} cores ({platform.machine()}), {versions}, load average {os.getloadavg()[0]:.1f} before"]
    lines.append(
        f"streams of {rate:g} tokens/s, {seconds:g} s with all of them; ms from a worker's send to its receipt"
    )
    lines.append(f"aim: the router adds p50 <= {AIM_P50_MS:g} ms and p99 <= {AIM_P99_MS:g} ms at 200 streams")
    lines.append(f"{'':<25}{'p50':>9}{'p90':>9}{'p99':>9}{'max':>9}{'tokens/s':>10}   cores used")
    with tempfile.TemporaryDirectory() as folder:
        for streams in loads:
            lines += compare(Path(folder), streams, rate, seconds)
        sizes = run_memory(Path(folder) / "memory", requests) if requests else []
    if sizes:
        shown = ", ".join(f"{count}: {size:.1f}" for count, size in sizes)
        growth = sizes[-1][1] - sizes[1][1]
        lines.append(f"router's memory in MiB after requests: {shown}; {growth:+.1f} from the second to the last")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[50, 100, 200], help="loads to measure")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens/s of a stream")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=10_000, help="for the memory test; 0 leaves it out")
    parser.add_argument("--out", type=Path, help="also written to this file")
    given = parser.parse_args()
    text = report(given.streams, given.rate, given.seconds, given.requests)
    print(text, end="")
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
