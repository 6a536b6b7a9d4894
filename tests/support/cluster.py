"""A prefill, a decode and a router process, and a client for each door."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc, common_pb2, decode_pb2, decode_pb2_grpc
from tests.support.processes import Service


@dataclass
class Answer:
    tokens: list[int]
    finished: decode_pb2.Finished
    first_token_s: float


@dataclass
class Cluster:
    """Services of one checkpoint; `with_router` adds the HTTP door."""

    model: Path
    folder: Path
    prefill_flags: Sequence[str] = ()
    decode_flags: Sequence[str] = ()
    router_flags: Sequence[str] = ()
    with_router: bool = False
    prefill: Service = field(init=False)
    decode: Service = field(init=False)
    router: Service | None = None

    def start(self) -> Cluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        common = ("--model", str(self.model))
        small = ("--send-ring-bytes", str(32 << 20), "--threads", "1")
        self.prefill = Service("prefill_service", self.folder, *common, *small, *self.prefill_flags).launch()
        pools = ("--host-pages", "160", "--logical-pages", "160", "--max-requests", "12", "--shuffle-allocators", "11")
        self.decode = Service(
            "decode_service", self.folder, *common, *pools, "--threads", "1", *self.decode_flags
        ).launch()
        self.prefill.wait_ready()
        self.decode.wait_ready()
        if self.with_router:
            workers = ("--prefill", self.prefill.address, "--decode", self.decode.address, "--poll-interval-s", "0.2")
            self.router = Service("router_service", self.folder, *common, *workers, *self.router_flags).launch()
            self.wait_http_ready()
        return self

    def wait_http_ready(self, timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            except (httpx.HTTPError, FileNotFoundError):
                pass
            time.sleep(0.05)
        raise RuntimeError(f"the router is not ready: {self.router.log_tail() if self.router else ''}")

    @property
    def url(self) -> str:
        return f"http://{(self.folder / 'router_service.port').read_text()}"

    def stop(self) -> list[int]:
        """Exit statuses, router first."""
        return [service.stop() for service in (self.router, self.decode, self.prefill) if service is not None]

    def wait_idle(self, timeout_s: float) -> None:
        """Both workers run nothing and every page is free, within `timeout_s` seconds in all."""
        spent = self.decode.wait_idle(timeout_s)
        self.prefill.wait_idle(max(0.1, timeout_s - spent))

    def phase(self, service: Service, name: str) -> int:
        return sum(p.requests for p in service.status(check_integrity=False).phases if p.phase == name)

    def living(self) -> list[str]:
        """Ids of the requests that the decode service has."""
        with grpc.insecure_channel(self.decode.address) as channel:
            found = admin_pb2_grpc.AdminStub(channel).ListRequests(admin_pb2.ListRequestsRequest(), timeout=10)
        return [request.key.request_id for request in found.requests]

    def wait_phase(self, service: Service, name: str, timeout_s: float = 20.0) -> None:
        end = time.monotonic() + timeout_s
        # One channel for all questions: a phase may last but a moment.
        with grpc.insecure_channel(service.address) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            while time.monotonic() < end:
                status = admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
                if any(p.requests for p in status.phases if p.phase == name):
                    return
                time.sleep(0.002)
        raise AssertionError(f"{service.name} never showed phase {name}: {service.status()}")

    def generate(self, request_id: str, token_ids: Sequence[int], max_tokens: int = 16, **sampling: Any) -> Answer:
        """One request over gRPC, to its end. Raises grpc.RpcError."""
        return self._generate(self.prefill.address, request_id, token_ids, max_tokens, **sampling)

    def generate_from(self, prefill: str, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The tokens of one request by the prefill at that address. Raises grpc.RpcError."""
        return self._generate(prefill, request_id, token_ids, max_tokens).tokens

    def _generate(
        self, prefill: str, request_id: str, token_ids: Sequence[int], max_tokens: int, **sampling: Any
    ) -> Answer:
        sampling = {"ignore_eos": True} | sampling
        request = decode_pb2.GenerateRequest(
            request_id=request_id,
            prefill_address=prefill,
            token_ids=token_ids,
            sampling=common_pb2.SamplingParams(max_tokens=max_tokens, **sampling),
        )
        begun = time.monotonic()
        tokens: list[int] = []
        first = 0.0
        with grpc.insecure_channel(self.decode.address) as channel:
            for event in decode_pb2_grpc.DecodeStub(channel).Generate(request, timeout=120):
                if event.HasField("tokens"):
                    first = first or time.monotonic() - begun
                    tokens.extend(event.tokens.token_ids)
                if event.HasField("finished"):
                    return Answer(tokens, event.finished, first)
        raise RuntimeError("the stream ended without a result")

    def generate_together(self, prompts: Sequence[Sequence[int]], at_once: int = 8, **sampling: Any) -> list[Answer]:
        with ThreadPoolExecutor(at_once) as threads:
            futures = [
                threads.submit(self.generate, f"r{time.time_ns()}-{index}", prompt, **sampling)
                for index, prompt in enumerate(prompts)
            ]
            return [future.result() for future in futures]
