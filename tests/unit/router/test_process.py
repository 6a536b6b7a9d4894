"""The router as a process: what it imports, how it starts, how it drains."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import httpx
import pytest

from common.model.small_checkpoint import small_config
from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc, decode_pb2, decode_pb2_grpc

COMMAND = [sys.executable, "-m", "router_service"]


def test_it_imports_no_torch():
    code = "import router_service.main, sys; sys.exit(bool({'torch', 'mooncake', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Worker(decode_pb2_grpc.DecodeServicer, admin_pb2_grpc.AdminServicer):
    """Streams tokens until `go_on` is cleared."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()

    def GetStatus(self, request: admin_pb2.GetStatusRequest, context: grpc.ServicerContext) -> admin_pb2.GetStatusReply:
        return admin_pb2.GetStatusReply(ready=True, max_context_tokens=4096)

    def Generate(
        self, request: decode_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[decode_pb2.GenerateEvent]:
        yield decode_pb2.GenerateEvent(reserved=decode_pb2.Reserved())
        while self.go_on.is_set() and context.is_active():
            yield decode_pb2.GenerateEvent(tokens=decode_pb2.Tokens(token_ids=[70]))
            time.sleep(0.02)
        yield decode_pb2.GenerateEvent(finished=decode_pb2.Finished(reason=decode_pb2.FINISH_REASON_LENGTH))


@pytest.fixture
def worker() -> Iterator[tuple[Worker, str]]:
    made = Worker()
    server = grpc.server(futures.ThreadPoolExecutor(8))
    decode_pb2_grpc.add_DecodeServicer_to_server(made, server)
    admin_pb2_grpc.add_AdminServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield made, f"127.0.0.1:{port}"
    made.go_on.clear()
    server.stop(None).wait()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "config-only"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small_config()))
    return folder


def start(model: Path, address: str, *flags: str) -> tuple[subprocess.Popen[bytes], str]:
    port_file = model / "port"
    process = subprocess.Popen(
        [*COMMAND, "--model", str(model), "--port", "0", "--port-file", str(port_file), "--prefill", address, "--decode", address, *flags],
        stderr=(model / "log").open("wb"), env=os.environ,
    )  # fmt: skip
    end = time.monotonic() + 20
    while not port_file.exists():
        assert process.poll() is None, (model / "log").read_text()
        assert time.monotonic() < end
        time.sleep(0.02)
    return process, f"http://{port_file.read_text()}"


def test_sigterm_refuses_new_requests_while_running_ones_end(worker: tuple[Worker, str], model: Path):
    scripted, address = worker
    process, url = start(model, address)
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}, timeout=20) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(10)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["retry-after"]
    assert httpx.get(f"{url}/ready").status_code == 503
    assert process.poll() is None
    scripted.go_on.clear()
    reader.join(10)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(5) == 0
    for line in (model / "log").read_text().splitlines():
        assert json.loads(line)["service"] == "router"


def test_balancers_have_time_to_notice_before_anything_is_refused(worker: tuple[Worker, str], model: Path):
    scripted, address = worker
    scripted.go_on.clear()
    process, url = start(model, address, "--drain-notice-s", "1.5")
    with httpx.Client(base_url=url) as client:
        assert "connection" not in client.get("/ready").headers
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        not_ready = client.get("/ready")
        assert (not_ready.status_code, not_ready.json()["draining"]) == (503, True)
        assert not_ready.headers["connection"] == "close"
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        time.sleep(1.4)
        assert process.wait(5) == 0


def test_a_stream_that_outlasts_the_drain_time_is_cut(worker: tuple[Worker, str], model: Path):
    _, address = worker
    process, url = start(model, address, "--drain-timeout-s", "0.3")
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}, timeout=20) as answer:
        next(answer.iter_lines())
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 0


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--prefill", "nowhere"], "'nowhere' is not host:port"),
        (["--prefill", "host:70000"], "'host:70000' is not host:port"),
        (["--decode", ""], "decode names no worker"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_what_it_cannot_start_with_is_named(model: Path, flags: list[str], part: str):
    done = subprocess.run(
        [*COMMAND, "--model", str(model), *flags], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 1
    assert part in json.loads(done.stderr.splitlines()[-1])["detail"]


def test_a_taken_port_is_named(model: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*COMMAND, "--model", str(model), "--port", port], capture_output=True, text=True, timeout=20, check=False
        )
    assert done.returncode == 1
    assert "in use" in done.stderr
    assert port in done.stderr
