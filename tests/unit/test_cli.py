"""`dsv4-pd` on the command line, without starting a system."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.cli import up
from common.model.config import ModelConfig
from common.version import VERSION

COMMAND = str(Path(sys.executable).with_name("dsv4-pd"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    wide = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, env=wide, timeout=60, check=False)


def test_the_version_is_the_distributions():
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, VERSION)


def test_help_names_every_command():
    shown = run("--help").stdout
    assert all(f" {name} " in shown for name in ("up", "prefill", "decode", "router", "eval"))
    shown = run("up", "--help").stdout
    assert all(flag in shown for flag in ("--model", "--port", "--logs", "--run-directory", "--decode-flags"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("serve",), "serve"),
        (("up", "--frob"), "--frob"),
        (("up", "--port", "70000"), "--port"),
        (("router", "--port", "70000", "--model", "/m"), "setting port"),
        (("prefill", "--frob", "1"), "--frob"),
        (("decode",), "setting model"),
    ],
)
def test_wrong_flags_are_named_and_end_with_2(arguments: tuple[str, ...], part: str):
    done = run(*arguments)
    assert done.returncode == 2
    assert part in done.stderr


def test_the_model_is_the_shipped_one_or_a_small_seeded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(up, "SHIPPED_MODEL", tmp_path / "shipped")
    made = up.default_model(tmp_path)
    assert made.parent == tmp_path
    assert (made / "model.safetensors").exists()
    ModelConfig.from_file(made)
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "model.safetensors").touch()
    assert up.default_model(tmp_path) == tmp_path / "shipped"
