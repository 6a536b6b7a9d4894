"""deploy/setup.sh where it may not do what it would: it says what is needed and changes nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The set-up's files in a folder of their own, and commands that come before the system's."""
    (tmp_path / "deploy").mkdir()
    for name in ("deploy/setup.sh", "deploy/constraints.txt", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    return tmp_path


def command(checkout: Path, name: str, script: str) -> None:
    path = checkout / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "deploy/setup.sh", *arguments], cwd=checkout, capture_output=True, text=True, env=env, timeout=60, check=False,
    )  # fmt: skip


def test_an_unknown_argument_is_named(checkout: Path):
    done = run(checkout, "rocm")
    assert done.returncode == 2
    assert "'rocm'" in done.stderr


def test_without_root_the_missing_packages_are_named(checkout: Path):
    command(checkout, "ldconfig", "echo libnuma.so.1 '=>' /lib/libnuma.so.1")
    command(checkout, "id", "echo 1000")
    command(checkout, "sudo", "exit 1")
    command(checkout, "apt-get", "echo called >apt-was-called")
    done = run(checkout)
    assert done.returncode == 1
    assert "apt-get install libibverbs1 librdmacm1 libcurl4  as root" in done.stderr
    assert not (checkout / "apt-was-called").exists()
    assert not (checkout / ".venv").exists()


def test_a_failing_apt_get_is_reported(checkout: Path):
    command(checkout, "ldconfig", "true")
    command(checkout, "id", "echo 0")
    command(checkout, "apt-get", 'test "$1" = update')
    command(checkout, "env", 'shift; exec "$@"')
    done = run(checkout, "cuda12")
    assert done.returncode == 1
    assert "libibverbs1 librdmacm1 libnuma1 libcurl4 failed" in done.stderr
    assert not (checkout / ".venv").exists()


def test_an_old_python_is_refused(checkout: Path):
    libraries = " ".join(f"/lib/{name}.so.1" for name in ("libibverbs", "librdmacm", "libnuma", "libcurl"))
    command(checkout, "ldconfig", f"echo {libraries}")
    # The real interpreter, which says that it is an older one.
    pretend = "import sys; sys.version_info, sys.version = (3, 10, 1), '3.10.1 (old)'; exec(sys.stdin.read())"
    command(checkout, "python3", f'test "$1" = - && exec {sys.executable} -c "{pretend}"; exec {sys.executable} "$@"')
    done = run(checkout)
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed, python3 is 3.10.1" in done.stderr
    assert not (checkout / ".venv").exists()
