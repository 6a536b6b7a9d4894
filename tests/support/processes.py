"""Real services for tests: started on free ports, awaited, stopped, killed; their logs kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc

START_TIMEOUT_S = 60.0
REPOSITORY = Path(__file__).resolve().parents[2]


class Service:
    """One `python -m <package>` process."""

    def __init__(
        self, package: str, folder: Path, *flags: str, threads: int = 1, name: str = "", prefix: Sequence[str] = ()
    ) -> None:
        """`prefix` goes before the command, as in "ip netns exec x"."""
        self.prefix = prefix
        self.package = package
        self.flags = flags
        self.folder = folder
        self.name = name or package
        self.threads = threads
        self.address = ""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def launch(self, port: int = 0) -> Service:
        """Starts the process without waiting for it."""
        port_file = self.folder / f"{self.name}.port"
        port_file.unlink(missing_ok=True)
        command = [
            *self.prefix,
            sys.executable,
            "-m",
            self.package,
            "--port",
            str(port),
            "--port-file",
            str(port_file),
            *self.flags,
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
            )
        return self

    def wait_ready(self) -> Service:
        """Raises RuntimeError with the end of the log when the process ends or does not become ready."""
        port_file = self.folder / f"{self.name}.port"
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if self.process is not None and self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{self.log_tail()}")
            if port_file.exists():
                self.address = port_file.read_text()
                if self.serving():
                    return self
            time.sleep(0.05)
        raise RuntimeError(f"{self.name} did not become ready:\n{self.log_tail()}")

    def start(self, port: int = 0) -> Service:
        return self.launch(port).wait_ready()

    def serving(self) -> bool:
        with grpc.insecure_channel(self.address) as channel:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
            except grpc.RpcError:
                return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    def status(self, check_integrity: bool = True) -> admin_pb2.GetStatusReply:
        with grpc.insecure_channel(self.address) as channel:
            return admin_pb2_grpc.AdminStub(channel).GetStatus(
                admin_pb2.GetStatusRequest(check_integrity=check_integrity), timeout=10
            )

    def is_idle(self) -> bool:
        """Nothing runs, and every page is free or kept for prompts that begin with it."""
        status = self.status()
        return all(p.requests == 0 for p in status.phases) and all(p.free + p.cached == p.total for p in status.pools)

    def wait_idle(self, timeout_s: float) -> float:
        """Seconds until idle; raises AssertionError with the status when that takes too long."""
        begun = time.monotonic()
        while time.monotonic() - begun < timeout_s:
            if self.is_idle():
                return time.monotonic() - begun
            time.sleep(0.02)
        raise AssertionError(f"{self.name} is not idle after {timeout_s} s:\n{self.status()}\n{self.log_tail()}")

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(10)

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM; returns the exit status. Kills and raises RuntimeError when it does not end."""
        if self.process is None:
            return 0
        self.signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"{self.name} did not end on SIGTERM:\n{self.log_tail()}") from None

    def log_tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])
