"""The image's healthcheck, as docker runs it: a process with the container's variables."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.rpc.tls import Tls
from tests.support.certificates import Authority

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "docker" / "healthcheck.py"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _check(role: str, variables: dict[str, str]) -> int:
    environment = {**os.environ, **{f"DSV4PD_{role.upper()}_{name}": value for name, value in variables.items()}}
    return subprocess.run([sys.executable, SCRIPT, role], env=environment, capture_output=True, check=False).returncode


@contextmanager
def _worker(state: health_pb2.HealthCheckResponse.ServingStatus, tls: Tls | None = None) -> Iterator[str]:
    """A server of gRPC's health service; its port."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", state)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = "127.0.0.1:0"
    port = server.add_secure_port(address, tls.server()) if tls else server.add_insecure_port(address)
    server.start()
    try:
        yield str(port)
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_healthy_while_it_serves(role: str):
    with _worker(SERVING) as port:
        assert _check(role, {"PORT": port}) == 0
    assert _check(role, {"PORT": port}) == 1


def test_a_draining_worker_is_not_healthy():
    with _worker(NOT_SERVING) as port:
        assert _check("prefill", {"PORT": port}) == 1


def test_a_worker_with_certificates_is_asked_with_its_own(tmp_path: Path):
    signed = Authority(tmp_path / "ca").sign("decode")
    files = {"TLS_CA": str(signed.ca), "TLS_CERT": str(signed.cert), "TLS_KEY": str(signed.key)}
    with _worker(SERVING, Tls.load(signed.ca, signed.cert, signed.key)) as port:
        assert _check("decode", {"PORT": port, **files}) == 0
        assert _check("decode", {"PORT": port}) == 1


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
def test_a_router_is_healthy_when_it_is_ready(status: int, expected: int):
    asked: list[str] = []

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Ready)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert _check("router", {"PORT": str(server.server_port)}) == expected
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert asked == ["/ready"]
