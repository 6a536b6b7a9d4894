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
