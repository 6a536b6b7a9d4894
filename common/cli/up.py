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
from collections.abc import Callable
from contextlib import nullcontext
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
    logs: bool
    device: str
    prefill_flags: str
    decode_flags: str
    router_flags: str


class StartError(RuntimeError):
    """A service did not come up, or ended; the message has the end of its log."""


class _Stopped(Exception):
    """A signal came before all services were ready."""


class _Child:
    """One service process of ours; its log is a file, or our own standard error."""

    def __init__(self, name: str, folder: Path, to_file: bool, flags: list[str]) -> None:
        self.name = name
        self.log = folder / f"{name}.log" if to_file else None
        self.port_file = folder / f"{name}.port"
        self.port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"{name}_service", "--port-file", str(self.port_file), *flags]
        with nullcontext(sys.stderr) if self.log is None else self.log.open("wb") as log:
            # A session of its own: Ctrl-C reaches us alone, and we stop the children in order.
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def check_alive(self) -> None:
        """Raises StartError with the end of the log when the process is over."""
        status = self.process.poll()
        if status is None:
            return
        if self.log is None:
            raise StartError(f"{self.name} ended with status {status}")
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        raise StartError("\n".join([f"{self.name} ended with status {status}; the end of {self.log}:", *lines]))

    def address(self) -> str | None:
        """Where it listens, as soon as it does."""
        return self.port_file.read_text(encoding="utf-8") if self.port_file.exists() else None


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
        url = _start(settings, folder, children, stopping, console)
        _print_ready(url, console)
        while not stopping:
            for child in children:
                child.check_alive()
            time.sleep(0.2)
    except _Stopped:
        pass
    except StartError as error:
        # Log lines have brackets of their own and are not to be cut into lines.
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        status = 1
    finally:
        console.print("stopping")
        status = _stop(children, stopping, console) or status
    return status


def _start(settings: UpSettings, folder: Path, children: list[_Child], stopping: list[int], console: Console) -> str:
    """Starts all three; returns the router's address once it is ready. Raises StartError and _Stopped."""
    model = settings.model or default_model(folder)
    if not (model / "config.json").exists():
        raise StartError(f"{model} holds no config.json")
    where = "here" if settings.logs else f"in {folder}"
    console.print(f"model {model.name}, logs {where}", markup=False, highlight=False, soft_wrap=True)
    deadline = time.monotonic() + START_TIMEOUT_S
    worker = ["--model", str(model), "--port", "0", "--device", settings.device]
    worker += ["--threads", str(os.cpu_count() or 1)]

    def start(name: str, flags: list[str], more: str) -> _Child:
        child = _Child(name, folder, not settings.logs, [*flags, *shlex.split(more)])
        children.append(child)
        return child

    def wait_for(what: str, ready: Callable[[], str | None]) -> str:
        with console.status(f"waiting for {what}"):
            while not stopping:
                for child in children:
                    child.check_alive()
                found = ready()
                if found is not None:
                    return found
                if time.monotonic() > deadline:
                    raise StartError(f"{what} is not there after {START_TIMEOUT_S:g} s; logs are {where}")
                time.sleep(0.05)
        raise _Stopped

    prefill = start("prefill", worker, settings.prefill_flags)
    decode = start("decode", worker, settings.decode_flags)
    addresses = [wait_for("prefill", prefill.address), wait_for("decode", decode.address)]
    flags = ["--model", str(model), "--host", settings.host, "--port", str(settings.port)]
    flags += ["--prefill", addresses[0], "--decode", addresses[1]]
    router = start("router", flags, settings.router_flags)
    url = f"http://{wait_for('router', router.address)}"
    return wait_for("both workers to be ready", lambda: url if _is_ready(url) else None)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as answer:  # noqa: S310 - our own router
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _print_ready(url: str, console: Console) -> None:
    console.print(f"ready at {url}; Ctrl-C stops. Try:", style="green", highlight=False, soft_wrap=True)
    body = '{"prompt": "def add(a, b):\\n", "max_tokens": 48, "temperature": 0}'
    print(f"curl -s {url}/v1/completions -H 'content-type: application/json' -d '{body}'", flush=True)


def _stop(children: list[_Child], stopping: list[int], console: Console) -> int:
    """Router first, so that nothing new comes in, then decode, which tells prefill what to drop. Another signal
    meanwhile kills what is left."""
    status = 0
    asked = len(stopping)
    for child in reversed(children):
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
            end = time.monotonic() + STOP_TIMEOUT_S
            while child.process.poll() is None and time.monotonic() < end and len(stopping) == asked:
                time.sleep(0.02)
            if child.process.poll() is None:
                console.print(f"{child.name} has not stopped yet and is killed")
                child.process.kill()
                child.process.wait()
        # A service that did not listen yet may not have got as far as handling the signal.
        clean = (0,) if child.address() else (0, -signal.SIGTERM)
        status = status or (0 if child.process.returncode in clean else 1)
    console.print("stopped")
    return status
