"""API keys: who may come in, how much at a time, and that no secret is shown."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.cli.main import app
from common.rpc.gen.dsv4pd.v1 import decode_pb2
from router_service.api_keys import ApiKey, ApiKeys
from tests.unit.router.conftest import ServeRouter, eventually
from tests.unit.router.scripted_worker import Event, ScriptedWorker, finished, reserved

ALICE, BOB = "sk-alice-secret", "sk-bob-secret"


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def entry(name: str, secret: str, **limits: float) -> str:
    lines = [f"{k} = {v}" for k, v in limits.items()]
    return "\n".join(["[[key]]", f'name = "{name}"', f'sha256 = "{digest(secret)}"', *lines, ""])


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(entry("alice", ALICE) + entry("bob", BOB))
    return path


async def test_only_who_has_a_key_comes_in(serve_router: ServeRouter, keys: Path):
    worker = ScriptedWorker()
    router = await serve_router([worker], api_keys=keys)
    assert (await router.post(bearer(ALICE), prompt="x")).status_code == 200
    assert (await router.post({"authorization": f"bearer  {BOB}"}, prompt="x")).status_code == 200
    for headers in (
        {},
        bearer("sk-wrong"),
        bearer(digest(ALICE)),
        {"authorization": ALICE},
        {"authorization": f"Basic {ALICE}"},
    ):
        answer = await router.post(headers, prompt="x")
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (answer.headers["www-authenticate"], bool(answer.headers["x-request-id"])) == ("Bearer", True)
    assert len(worker.requests) == 2
    assert (await router.client.get("/v1/models")).status_code == 401
    assert (await router.client.get("/v1/models", headers=bearer(ALICE))).status_code == 200
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert (await router.client.get(path)).status_code == 200


async def test_a_request_without_a_key_is_refused_before_its_body_is_read(serve_router: ServeRouter, keys: Path):
    router = await serve_router([ScriptedWorker()], api_keys=keys)
    reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
    assert b" 401 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()


async def test_each_key_has_its_own_bound_on_requests_at_a_time(serve_router: ServeRouter, keys: Path):
    keys.write_text(entry("alice", ALICE, max_concurrent=2) + entry("bob", BOB))
    go = asyncio.Event()

    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        await go.wait()
        yield finished()

    worker = ScriptedWorker(script)
    router = await serve_router([worker], api_keys=keys)
    running = [asyncio.create_task(router.post(bearer(ALICE), prompt="x", stream=n == 0)) for n in range(2)]
    await eventually(lambda: worker.running == 2)
    refused = await router.post(bearer(ALICE), prompt="x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert refused.headers["retry-after"] == "1"
    running.append(asyncio.create_task(router.post(bearer(BOB), prompt="x")))
    await eventually(lambda: worker.running == 3)
    go.set()
    assert [(await task).status_code for task in running] == [200] * 3
    assert (await router.post(bearer(ALICE), prompt="x")).status_code == 200


async def test_each_key_has_its_own_rate_and_learns_when_to_come_again(serve_router: ServeRouter, keys: Path):
    keys.write_text(entry("alice", ALICE, requests_per_minute=3) + entry("bob", BOB))
    router = await serve_router([ScriptedWorker()], api_keys=keys)
    statuses = [(await router.post(bearer(ALICE), prompt="x")) for _ in range(4)]
    assert [answer.status_code for answer in statuses] == [200, 200, 200, 429]
    assert statuses[3].json()["error"]["code"] == "rate_limit_exceeded"
    assert 18 <= int(statuses[3].headers["retry-after"]) <= 20
    assert (await router.client.get("/v1/models", headers=bearer(ALICE))).status_code == 200
    assert (await router.post(bearer(BOB), prompt="x")).status_code == 200
    assert await router.metric("dsv4pd_router_shed_total") == 1


def test_the_rate_refills_and_never_beyond_a_minutes_worth():
    now = [0.0]
    keys = ApiKeys([ApiKey(name="a", sha256=digest("a"), requests_per_minute=60)], lambda: now[0])
    usage = keys.find(b"a")
    assert usage is not None
    usage.allowance = 0
    assert usage.wait_s(keys.now()) == pytest.approx(1)
    now[0] = 0.75
    assert usage.wait_s(keys.now()) == pytest.approx(0.25)
    now[0] = 1000
    assert usage.wait_s(keys.now()) == 0
    assert usage.allowance == 60


async def test_no_secret_is_logged(serve_router: ServeRouter, keys: Path, capfd: pytest.CaptureFixture[str]):
    router = await serve_router([ScriptedWorker()], api_keys=keys)
    await router.post(bearer(ALICE), prompt="x")
    await router.post(bearer("sk-wrong-secret"), prompt="x")
    shown = "".join(capfd.readouterr())
    assert "key=alice" in shown
    assert not [secret for secret in (ALICE, BOB, "sk-wrong-secret", digest(ALICE)) if secret in shown]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "expected"),
        ("[[key]]\nname='a'\n", "key 0: sha256: Field required"),
        ("[[key]]\nname='a'\nsha256='sk-the-secret-itself'\n", "key 0: sha256"),
        (f"[[key]]\nname=''\nsha256='{digest('a')}'\n", "key 0: name"),
        (f"[[key]]\nname='a'\nsha256='{digest('a')}'\nadmin=true\n", "admin"),
        (entry("a", "1") + entry("a", "2"), "same name"),
        (entry("a", "1") + entry("b", "1"), "same sha256"),
        ("[[key]\n", "keys.toml"),
        ("other = 1\n" + entry("a", "1"), "nothing else"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_named_without_what_it_holds(keys: Path, content: str, part: str):
    keys.write_text(content)
    with pytest.raises(ValueError, match=r"keys\.toml") as raised:
        ApiKeys.load(keys)
    assert part in str(raised.value)
    assert "sk-the-secret-itself" not in str(raised.value)


def test_the_command_makes_a_key_and_its_entry(keys: Path):
    done = CliRunner().invoke(app, ["keys", "new", "carol"])
    assert done.exit_code == 0
    secret = done.stdout.strip()
    keys.write_text(done.stderr[done.stderr.index("[[key]]") : done.stderr.index("the secret")])
    usage = ApiKeys.load(keys).find(secret.encode())
    assert usage is not None
    assert (usage.key.name, secret in done.stderr) == ("carol", False)
    made = CliRunner().invoke(app, ["keys", "admin-token"])
    assert hashlib.sha256(made.stdout.strip().encode()).hexdigest() in made.stderr
