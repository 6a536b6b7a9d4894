"""The doctor says what is there, and finds what is wrong."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.cli import doctor
from common.transfer.engine import EngineSettings, TransferEngine
from common.transfer.rdma import RdmaDevice, RdmaPort


def states(findings: list[doctor.Finding]) -> dict[str, str]:
    return {finding.what: finding.state for finding in findings}


@pytest.mark.system
def test_a_host_on_which_the_tests_run_is_healthy():
    command = str(Path(sys.executable).with_name("dsv4-pd"))
    done = subprocess.run([command, "doctor"], capture_output=True, text=True, timeout=60, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout
    lines = {line[6:18].strip(): line for line in done.stdout.splitlines()}
    assert {"python", "torch", "mooncake", "cpu", "gpu", "rdma", "memlock", "transports", "loopback"} <= set(lines)
    assert "digests equal" in lines["loopback"]


def test_two_mooncakes_are_bad(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_version", lambda package: "1.0" if "mooncake" in package else "")
    assert states(doctor.versions())["mooncake"] == "bad"
    monkeypatch.setattr(doctor, "_version", lambda package: "")
    assert states(doctor.versions())["mooncake"] == "bad"


def test_a_device_without_an_active_port_is_noted():
    port = RdmaPort(1, "1: DOWN", "Ethernet", "400 Gb/sec", ())
    (finding,) = doctor.rdma((RdmaDevice("mlx5_0", 0, (port,)),))
    assert finding.state == "note"
    assert "mlx5_0, NUMA node 0: port 1 1: DOWN" in finding.detail
    assert doctor.transports((RdmaDevice("mlx5_0", 0, (port,)),)).detail == "tcp"


class DeafEngine(TransferEngine):
    """Whose writes never end well."""

    def submit_write(self, session: str, source: int, target: int, size: int) -> int:
        return 0


class LyingEngine(TransferEngine):
    """Whose writes end well and change nothing."""

    def submit_write(self, session: str, source: int, target: int, size: int) -> int:
        return 7

    def check(self, transfer: int) -> Any:
        return "done"


@pytest.mark.system
@pytest.mark.parametrize(("engine", "part"), [(DeafEngine, "is failed"), (LyingEngine, "other bytes landed")])
def test_a_transfer_that_does_not_arrive_is_bad(engine: type[TransferEngine], part: str):
    finding = doctor.loopback(lambda: engine(EngineSettings()))
    assert finding.state == "bad"
    assert part in finding.detail
