"""The router's process at its door: heads that are too long or too slow, and HTTPS."""

import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.certificates import Authority
from tests.unit.router.test_process import Worker, model, start, worker  # noqa: F401 - fixtures

LIMIT = 4096


@pytest.fixture
def door(worker: tuple[Worker, str], model: Path) -> Iterator[tuple[str, int]]:  # noqa: F811
    process, url = start(model, worker[1], "--max-head-bytes", str(LIMIT), "--head-timeout-s", "1")
    host, _, port = url.removeprefix("http://").rpartition(":")
    yield host, int(port)
    process.terminate()
    assert process.wait(10) == 0


def answer_to(door: tuple[str, int], *parts: bytes, pause_s: float = 0.0) -> bytes:
    """All that comes back until the server closes, or says no more for a while."""
    with socket.create_connection(door, timeout=5) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)
        found = b""
        try:
            while piece := connection.recv(65536):
                found += piece
        except (TimeoutError, ConnectionResetError):
            pass
        return found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_a_head_beyond_the_bound_is_431_whether_it_ends_or_not(door: tuple[str, int]):
    line = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    cases = [
        (line + b"a: " + b"b" * LIMIT + b"\r\n\r\n",),
        (line + b"".join(b"h%d: v\r\n" % n for n in range(LIMIT // 8)) + b"\r\n",),
        (line + b"a: ", *[b"b" * 1000] * 5),
        (b"GET /" + b"x" * LIMIT + b" HTTP/1.1\r\nhost: x\r\n\r\n",),
        (b"GET /", *[b"x" * 1000] * 5),
    ]
    for parts in cases:
        answer = answer_to(door, *parts, pause_s=0.01)
        assert status(answer) == 431
        assert f"longer than {LIMIT} bytes" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    just_short = line + b"connection: close\r\na: " + b"b" * (LIMIT - 200) + b"\r\n\r\n"
    assert status(answer_to(door, just_short)) == 200


def test_a_long_body_does_not_count_for_the_head(door: tuple[str, int]):
    body = json.dumps({"prompt": "x", "frob": "u" * 3 * LIMIT}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    answer = answer_to(door, head + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert (status(answer), b"frob" in answer) == (400, True)
    # The next request on the same connection is measured anew.
    with httpx.Client(base_url=f"http://{door[0]}:{door[1]}") as client:
        for _ in range(3):
            assert client.get("/health", headers={"a": "b" * (LIMIT - 400)}).status_code == 200


def test_a_head_that_does_not_come_is_408(door: tuple[str, int]):
    begun = time.monotonic()
    assert status(answer_to(door, b"GET /health HTTP/1.1\r\nhost: ")) == 408
    assert status(answer_to(door)) == 408
    assert time.monotonic() - begun < 4


def test_what_is_no_http_is_400_in_the_usual_shape(door: tuple[str, int]):
    answer = answer_to(door, b"\x16\x03\x01 hello\r\n\r\n")
    assert status(answer) == 400
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_https(worker: tuple[Worker, str], model: Path, tmp_path: Path):  # noqa: F811
    authority = Authority(tmp_path / "ca")
    signed = authority.sign("router")
    process, url = start(model, worker[1], "--https-cert", str(signed.cert), "--https-key", str(signed.key))
    url = url.replace("http://", "https://")
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    assert httpx.get(f"{url}/ready", verify=trusting).json()["ready"] is True
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/ready")
    with pytest.raises(httpx.HTTPError):
        httpx.get(url.replace("https://", "http://") + "/ready")
    process.terminate()
    assert process.wait(10) == 0
