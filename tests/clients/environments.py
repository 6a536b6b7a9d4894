"""Virtual environments of third-party clients: made once, kept in a cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

INSTALL_TIMEOUT_S = 900


def cache_directory() -> Path:
    """DSV4PD_CLIENT_CACHE, or a folder of the user's cache."""
    return Path(os.environ.get("DSV4PD_CLIENT_CACHE", Path.home() / ".cache" / "dsv4-pd" / "clients"))


def client_environment(name: str, requirements: Sequence[str]) -> Path:
    """The `bin` directory of an environment that has the pinned requirements; its name carries their hash, so another
    pin makes another one. Raises RuntimeError with pip's words when they can't be installed."""
    key = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:12]
    folder = cache_directory() / f"{name}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], check=True)
            pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "-q", *requirements]
            made = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
            if made.returncode:
                raise RuntimeError(f"{name} can't be installed:\n{made.stderr[-4000:]}")
            (folder / "complete").touch()
    return folder / "venv" / "bin"


def run_client(command: Sequence[str | Path], folder: Path, timeout_s: float = 110, **variables: str) -> str:
    """Its standard output. Raises AssertionError with all it said when it fails."""
    # Nothing of our own environment leaks in, and nothing is asked of a model hub.
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "hf"),
        "NO_PROXY": "127.0.0.1,localhost", "COLUMNS": "200",
    } | variables  # fmt: skip
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout
