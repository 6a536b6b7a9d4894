"""`dsv4-pd up`: the whole system on one machine, for a first look and for development."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import types
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 45.0
LOG_LINES_SHOWN = 15
SHIPPED_MODEL = Path(__file__).resolve().parents[2] / "models" / "dsv4-nano"


@dataclass(frozen=True)
class UpSettings:
    model: Path | None
    host: str
    port: int
    run_directory: Path | None
    prefill_flags: str
    decode_flags: str
    router_flags: str


class StartError(RuntimeError):
    """A service did not come up, or ended; the message has the end of its log."""


class _Child:
    """One service process of ours; its log is a file."""

    def __init__(self, name: str, folder: Path, flags: list[str]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.port_file = folder / f"{name}.port"
        self.port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"{name}_service", "--port-file", str(self.port_file), *flags]
        with self.log.open("wb") as log:
            # A session of its own: Ctrl-C reaches us alone, and we stop the children in order.
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def check_alive(self) -> None:
        """Raises StartError with the end of the log when the process is over."""
        status = self.process.poll()
        if status is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
            raise StartError("\n".join([f"{self.name} ended with status {status}; the end of {self.log}:", *lines]))

    def address(self, deadline: float) -> str:
        """Where it listens, as soon as it does."""
        while time.monotonic() < deadline:
            self.check_alive()
            if self.port_file.exists():
                return self.port_file.read_text(encoding="utf-8")
            time.sleep(0.05)
        raise StartError(f"{self.name} did not listen within {START_TIMEOUT_S:g} s; see {self.log}")


def default_model(folder: Path) -> Path:
    """The trained model that ships with the repository, or else a small seeded one, written to `folder`."""
    if (SHIPPED_MODEL / "model.safetensors").exists():
        return SHIPPED_MODEL
    from common.model.small_checkpoint import write_small_checkpoint

    path = folder / "small-untrained"
    write_small_checkpoint(path)
    return path


def run_up(settings: UpSettings) -> int:
    """Starts, waits, prints, and stops everything on SIGINT or SIGTERM; returns the exit status."""
    console = Console(stderr=True)
    stopping: list[int] = []

    def stop(number: int, _: types.FrameType | None) -> None:
        stopping.append(number)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    folder = settings.run_directory or Path(tempfile.mkdtemp(prefix="dsv4-pd-"))
    folder.mkdir(parents=True, exist_ok=True)
    children: list[_Child] = []
    status = 0
    try:
        with console.status("starting"):
            url = _start(settings, folder, children, stopping, console)
        if not stopping:
            _print_ready(url, folder, console)
        while not stopping:
            for child in children:
                child.check_alive()
            time.sleep(0.2)
    except StartError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        status = 1
    finally:
        console.print("stopping")
        status = _stop(children, console) or status
    return status


def _start(settings: UpSettings, folder: Path, children: list[_Child], stopping: list[int], console: Console) -> str:
    model = settings.model or default_model(folder)
    if not (model / "config.json").exists():
        raise StartError(f"{model} holds no config.json")
    console.print(f"model {model.name}, logs in {folder}", highlight=False)
    deadline = time.monotonic() + START_TIMEOUT_S
    threads = str(max(1, (os.cpu_count() or 1)))
    worker = ["--model", str(model), "--port", "0", "--threads", threads]
    prefill = _Child("prefill", folder, [*worker, *shlex.split(settings.prefill_flags)])
    children.append(prefill)
    decode = _Child("decode", folder, [*worker, *shlex.split(settings.decode_flags)])
    children.append(decode)
    flags = ["--model", str(model), "--host", settings.host, "--port", str(settings.port)]
    flags += ["--prefill", prefill.address(deadline), "--decode", decode.address(deadline)]
    router = _Child("router", folder, [*flags, *shlex.split(settings.router_flags)])
    children.append(router)
    url = f"http://{router.address(deadline)}"
    while not stopping:
        for child in children:
            child.check_alive()
        if _is_ready(url):
            return url
        if time.monotonic() > deadline:
            raise StartError(f"{url}/ready did not answer 200 within {START_TIMEOUT_S:g} s; see {folder}")
        time.sleep(0.1)
    return url


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as answer:  # noqa: S310 - our own router
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _print_ready(url: str, folder: Path, console: Console) -> None:
    console.print(f"[green]ready[/green] at {url} (logs in {folder}); Ctrl-C stops. Try:", highlight=False)
    body = '{"prompt": "def add(a, b):\\n", "max_tokens": 48, "temperature": 0}'
    print(f"curl -s {url}/v1/completions -H 'content-type: application/json' -d '{body}'", flush=True)


def _stop(children: list[_Child], console: Console) -> int:
    """Router first, so that nothing new comes in, then decode, which tells prefill what to drop."""
    status = 0
    for child in reversed(children):
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
            try:
                child.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                console.print(f"{child.name} did not stop within {STOP_TIMEOUT_S:g} s and is killed")
                child.process.kill()
                child.process.wait()
        status = status or (1 if child.process.returncode else 0)
    console.print("stopped")
    return status
