"""docker-compose up for real: our own engine, the image built from its locks, and what an operator does with it.

The tests follow one system through its life and stand in that order. They fail when no engine can be started, unless
DSV4PD_ALLOW_NO_DOCKER=1 allows to skip them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.compose.engine import Engine, EngineUnavailable, Project, fail_or_skip

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
CONTEXT = ("common", "decode_service", "prefill_service", "router_service", "models", "deploy")
FILES = ("docker-compose.yml", ".dockerignore", "pyproject.toml", "README.md")
IMAGE = "dsv4-pd:cpu"
SIZE_LIMIT_BYTES = 1_600_000_000
GLOG = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ \S+:\d+\] |WARNING: Logging before InitGoogleLogging")
QUESTION = "".join(f"{key}={value}\n" for key, value in (("cavl", "7047"), ("fkaf", "4422"))) + "".join(
    f"{chr(97 + n)}{chr(98 + n)}xy={1000 + 37 * n}\n" for n in range(20)
)


class System:
    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        environment = {"DSV4PD_PORT": str(self.port), "DSV4PD_BUILD_NETWORK": "host", "COMPOSE_PROJECT_NAME": "dsv4pd"}
        self.project = Project(engine, folder, environment)

    def usable(self, role: str) -> int:
        """How many workers the router would use."""
        try:
            workers: dict[str, Any] = httpx.get(f"{self.url}/ready", timeout=5).json()["workers"][role]
        except httpx.HTTPError:
            return -1
        return sum(state == "usable" for state in workers.values())

    def wait_usable(self, prefill: int, decode: int, timeout_s: float = 120) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if (self.usable("prefill"), self.usable("decode")) == (prefill, decode):
                return
            time.sleep(0.2)
        raise AssertionError(f"not {prefill}+{decode} usable after {timeout_s} s:\n{self.logs()[-6000:]}")

    def wait_healthy(self, timeout_s: float = 120) -> None:
        """Docker's own view, by the image's healthchecks."""
        containers = [c for service in ("prefill", "decode", "router") for c in self.project.containers(service)]
        end = time.monotonic() + timeout_s
        states: list[str] = []
        while time.monotonic() < end:
            states = [self.project.state(c, "{{.State.Health.Status}}") for c in containers]
            if set(states) == {"healthy"}:
                return
            time.sleep(0.5)
        raise AssertionError(f"{states} after {timeout_s} s:\n{self.logs()[-6000:]}")

    def ask(self) -> tuple[int, str]:
        """Status and text of one question of which the answer is known."""
        body = {"prompt": f"{QUESTION}fkaf?", "max_tokens": 5, "temperature": 0, "stop": "\n"}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text

    def logs(self) -> str:
        return self.project.compose("logs", "--no-color", "--tail", "40")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine()
    try:
        try:
            made.start()
        except EngineUnavailable as error:
            fail_or_skip(error)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def system(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The image is built from a copy, so that nothing is left in the working tree."""
    folder = tmp_path_factory.mktemp("project")
    for name in CONTEXT:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "wheels"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    try:
        # One waits for the network, the other for the processor.
        with ThreadPoolExecutor(1) as beside:
            wheels = beside.submit(_fetch_wheels, folder / "deploy" / "build-inputs" / "wheels")
            engine.import_base()
            wheels.result()
    except EngineUnavailable as error:
        fail_or_skip(error)
    made = System(engine, folder)
    made.project.compose("build", "router", timeout_s=420)
    try:
        made.project.compose("up", "-d", "--no-build", timeout_s=120)
        yield made
    finally:
        made.project.compose("down", "-v", "-t", "10", timeout_s=120)


def _fetch_wheels(folder: Path) -> None:
    """By the pip of this machine, with its settings; the build then needs no package index. Hashes are checked here
    and in the build."""
    for lock in ("cpu", "build"):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        command += ["--python-version", "3.11", "--require-hashes", "-r", f"deploy/locks/{lock}.txt", "-d", str(folder)]
        for platform in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
            command += ["--platform", platform]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _recall(system: System, n: int) -> None:
    command = [Path(sys.executable).parent / "dsv4-pd", "eval", "recall", "--n", str(n), "--context", "1200"]
    command += ["--gate", "0.95", "--concurrency", "4", "--url", system.url]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_up_is_healthy_and_answers(system: System):
    system.wait_healthy()
    assert system.ask() == (200, "4422")


def test_the_image_is_locked_down(system: System):
    run = ("run", "--rm", "--network", "none", "--entrypoint")
    assert system.engine.docker(*run, "id", IMAGE, "-u").strip() == "10001"
    tools = "for t in gcc cc g++ make ld pip pip3 git; do command -v $t; done; true"
    assert system.engine.docker(*run, "sh", IMAGE, "-c", tools).strip() == ""
    with pytest.raises(AssertionError, match="No module named 'pip'"):
        system.engine.docker(*run, "python", IMAGE, "-c", "import pip")
    sbom = json.loads(system.engine.docker(*run, "cat", IMAGE, "/opt/dsv4-pd/sbom.cdx.json"))
    assert sbom["bomFormat"] == "CycloneDX"
    assert {"torch", "grpcio", "mooncake-transfer-engine-non-cuda"} <= {c["name"] for c in sbom["components"]}
    size = int(system.engine.docker("image", "inspect", "-f", "{{.Size}}", IMAGE))
    print(f"image size {size / 1e6:.0f} MB")
    assert size < SIZE_LIMIT_BYTES
    container = system.project.containers("prefill")[0]
    with pytest.raises(AssertionError, match="Read-only file system"):
        system.engine.docker("exec", container, "touch", "/opt/dsv4-pd/x")


def test_recall_through_the_containers(system: System):
    _recall(system, 20)


def test_scaled_to_two_and_two(system: System):
    scale = ("--scale", "prefill=2", "--scale", "decode=2")
    system.project.compose("up", "-d", "--no-build", "--no-recreate", *scale, timeout_s=120)
    system.wait_usable(2, 2)
    _recall(system, 8)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_container_is_done_without_and_comes_back(system: System, role: str):
    """What it was doing is lost; others take the next requests, and the restart policy brings it back."""
    system.wait_usable(2, 2)
    victim = system.project.containers(role)[0]
    # Its first process, as a crash would end it: what docker kill ends is not restarted.
    os.kill(int(system.project.state(victim, "{{.State.Pid}}")), signal.SIGKILL)
    system.wait_usable(*((1, 2) if role == "prefill" else (2, 1)), timeout_s=20)
    assert system.ask() == (200, "4422")
    system.wait_usable(2, 2)
    assert int(system.project.state(victim, "{{.RestartCount}}")) == 1
    assert system.ask() == (200, "4422")


def test_a_rolling_restart_of_the_workers_loses_no_request(system: System):
    system.wait_usable(2, 2)
    stopping = threading.Event()
    outcomes: list[tuple[int, str]] = []

    def load() -> None:
        while not stopping.is_set():
            outcomes.append(system.ask())

    clients = [threading.Thread(target=load) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        for role in ("prefill", "decode"):
            for container in system.project.containers(role):
                system.engine.docker("restart", "-t", "45", container, timeout_s=90)
                system.wait_usable(2, 2)
    finally:
        stopping.set()
        for client in clients:
            client.join()
    assert len(outcomes) > 10
    assert set(outcomes) == {(200, "4422")}


def test_a_restarted_router_finds_its_workers_again(system: System):
    container = system.project.containers("router")[0]
    system.engine.docker("restart", "-t", "45", container, timeout_s=90)
    system.wait_usable(2, 2)
    assert system.ask() == (200, "4422")


def test_logs_are_json(system: System):
    """But for what Mooncake's C++ writes by itself (glog), which has no other form."""
    for service in ("prefill", "decode", "router"):
        for container in system.project.containers(service):
            done = subprocess.run(
                ["docker", "-H", system.engine.socket, "logs", container], capture_output=True, text=True, check=True
            )
            lines = (done.stdout + done.stderr).splitlines()
            assert any(line.startswith("{") for line in lines)
            for line in lines:
                if GLOG.match(line):
                    continue
                event = json.loads(line)
                assert event["service"] == service, line
                assert {"event", "level", "timestamp"} <= event.keys(), line


def test_down_is_clean(system: System):
    """Every service ends by itself, status 0, within its grace; nothing is left."""
    containers = [c for service in ("prefill", "decode", "router") for c in system.project.containers(service)]
    assert len(containers) == 5
    system.project.compose("stop", timeout_s=240)
    states = [system.project.state(c, "{{.State.ExitCode}} {{.State.OOMKilled}}") for c in containers]
    assert states == ["0 false"] * 5, system.logs()[-6000:]
    system.project.compose("down", "-v", timeout_s=120)
    assert system.engine.docker("ps", "-aq").strip() == ""
    assert "dsv4pd" not in system.engine.docker("network", "ls", "--format", "{{.Name}}")
