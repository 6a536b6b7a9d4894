"""`dsv4-pd up`: starts all, answers the curl it prints, stops all on Ctrl-C, says which service failed."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.system
COMMAND = str(Path(sys.executable).with_name("dsv4-pd"))


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [COMMAND, "up", "--port", "0", "--run-directory", str(folder), *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_printed_curl_answers_and_ctrl_c_stops_all_cleanly(tmp_path: Path):
    process = start(tmp_path)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("curl ")
    assert {path.name for path in tmp_path.glob("*.log")} == {"prefill.log", "decode.log", "router.log"}
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 3
    answer = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True).stdout
    assert '"text_completion"' in answer
    process.send_signal(signal.SIGINT)
    assert process.wait(40) == 0
    assert not any(child.is_running() for child in children)


def test_a_service_that_ends_takes_the_others_with_it_and_is_named(tmp_path: Path):
    process = start(tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    children = psutil.Process(process.pid).children()
    decode = next(child for child in children if "decode_service" in " ".join(child.cmdline()))
    decode.kill()
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 1
    assert "decode ended with status -9" in errors
    end = time.monotonic() + 5
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_ctrl_c_while_starting_stops_what_was_started(tmp_path: Path):
    process = start(tmp_path)
    parent = psutil.Process(process.pid)
    end = time.monotonic() + 20
    while not (children := parent.children()):
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=20)
    assert (process.returncode, shown) == (0, "")
    assert "stopped" in errors
    assert not any(child.is_running() for child in children)


def test_logs_come_to_the_terminal_when_asked_and_a_second_ctrl_c_does_not_wait(tmp_path: Path):
    # A decode that can't handle its signal: stopped itself.
    process = start(tmp_path, "--logs")
    assert process.stdout is not None
    process.stdout.readline()
    decode = next(c for c in psutil.Process(process.pid).children() if "decode_service" in " ".join(c.cmdline()))
    decode.suspend()
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "decode has not stopped yet and is killed" in errors
    assert '"service": "router"' in errors
    assert list(tmp_path.glob("*.log")) == []


def test_the_log_lines_of_a_service_that_cannot_start_are_shown_as_they_are(tmp_path: Path):
    odd = tmp_path / "[/red] [model]"
    odd.mkdir(parents=True)
    (odd / "config.json").write_text("{}")
    process = start(tmp_path, "--model", str(odd))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ended with status 1" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--model", "/nowhere"), "holds no config.json"),
        (("--decode-flags", "--hot-entries 3"), "hot_entries = 3 is less than the model's index_topk = 64"),
        (("--decode-flags", "--host-pages 0"), "host_pages"),
        (("--prefill-flags", "--send-ring-bytes 1000"), "send_ring_bytes = 1000"),
        (("--prefill-flags", "--frob 1"), "frob"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path: Path, flags: tuple[str, ...], part: str):
    process = start(tmp_path, *flags)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert part in errors.replace("\n", "")


def test_each_service_lists_its_settings():
    for service in ("prefill", "decode", "router"):
        shown = subprocess.run([COMMAND, service, "--help"], capture_output=True, text=True, check=True)
        assert "--log-level" in shown.stdout
