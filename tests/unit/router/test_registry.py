"""Workers that register by themselves, with real gRPC between registration and registry."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

from common.config import WorkerSettings
from common.model.small_checkpoint import small_config
from common.rpc.channels import open_channel
from common.rpc.gen.dsv4pd.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from common.rpc.identity import new_incarnation
from common.rpc.registration import Registration
from router_service.registry_server import serve_registry
from router_service.settings import RouterSettings
from tests.unit.router.conftest import ServeRouter, eventually
from tests.unit.router.scripted_worker import ScriptedWorker


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def registration(role: str, router_port: int, **settings: str) -> Registration:
    made = WorkerSettings(register_with=f"127.0.0.1:{router_port}", **settings)
    return Registration(made, new_incarnation(role))


@asynccontextmanager
async def registry(router, port: int, lease_s: float, host: str = "") -> AsyncIterator[None]:
    settings = RouterSettings(model=Path("/m"), registry_port=port, registry_host=host, lease_s=lease_s)
    server = await serve_registry(settings, router.state.workers)
    yield
    await server.close()


async def test_a_worker_joins_beside_the_static_ones_and_leaves(serve_router: ServeRouter):
    port = free_port()
    router = await serve_router([ScriptedWorker(free_pages=5)], poll_interval_s=60)
    async with registry(router, port, lease_s=5):
        joining = await ScriptedWorker(free_pages=90).start()
        mine = registration("decode", port)
        mine.start(joining.address)
        await eventually(lambda: any(w.usable and w.address == joining.address for w in router.state.workers.decode))
        await router.post(prompt="x")
        assert len(joining.requests) == 1
        await mine.close()
        await eventually(lambda: len(router.state.workers.decode) == 1)
        await router.post(prompt="x")
        assert len(joining.requests) == 1
        await joining.stop()


async def test_a_worker_that_sends_no_heartbeat_is_forgotten_but_ends_what_it_runs(serve_router: ServeRouter):
    port = free_port()
    router = await serve_router([ScriptedWorker()], poll_interval_s=0.05)
    async with registry(router, port, lease_s=0.5):
        joining = await ScriptedWorker(free_pages=90).start()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub = registry_pb2_grpc.RegistryStub(channel)
            request = registry_pb2.RegisterRequest(incarnation=new_incarnation("decode"), address=joining.address)
            reply = await stub.Register(request)
            assert reply.lease_s == 0.5
            worker = next(w for w in router.state.workers.decode if w.address == joining.address)
            worker.requests += 1
            for _ in range(4):
                await asyncio.sleep(0.2)
                await stub.Heartbeat(registry_pb2.HeartbeatRequest(lease_id=reply.lease_id))
            assert worker.can_take
            await eventually(lambda: not worker.can_take, 2)
            assert worker in router.state.workers.decode
            worker.requests -= 1
            await eventually(lambda: worker not in router.state.workers.decode)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Heartbeat(registry_pb2.HeartbeatRequest(lease_id=reply.lease_id))
            assert raised.value.code() == grpc.StatusCode.NOT_FOUND
        await joining.stop()


async def test_a_router_that_restarts_is_told_again(serve_router: ServeRouter):
    port = free_port()
    router = await serve_router([ScriptedWorker()])
    joining = await ScriptedWorker().start()
    mine = registration("prefill", port)
    mine.start(joining.address)  # before the registry is there
    for _ in range(2):
        async with registry(router, port, lease_s=1):
            await eventually(lambda: any(w.address == joining.address for w in router.state.workers.prefill))
            router.state.workers.leave("prefill", joining.address, "forgotten")
            await eventually(lambda: all(w.address != joining.address for w in router.state.workers.prefill))
    await mine.close()
    await joining.stop()


async def test_a_name_that_stands_for_several_routers_is_followed(
    serve_router: ServeRouter, monkeypatch: pytest.MonkeyPatch
):
    """A headless Service or scaled containers: one name, many routers, that come and go."""
    monkeypatch.setattr("common.rpc.registration.RESOLVE_INTERVAL_S", 0.05)
    port = free_port()
    routers = [await serve_router([ScriptedWorker()], poll_interval_s=60) for _ in range(2)]
    there: list[str] = []

    async def resolve(host: str, asked: int) -> list[str]:
        assert (host, asked) == ("routers.internal", port)
        if not there:
            raise socket.gaierror("no such name yet")
        return there

    def known(index: int) -> bool:
        return any(w.address == joining.address for w in routers[index].state.workers.prefill)

    joining = await ScriptedWorker().start()
    settings = WorkerSettings(register_with=f"routers.internal:{port}")
    mine = Registration(settings, new_incarnation("prefill"), resolve=resolve)
    mine.start(joining.address)
    async with registry(routers[0], port, 0.8, "127.0.0.1"), registry(routers[1], port, 0.8, "127.0.0.2"):
        there = ["127.0.0.1"]
        await eventually(lambda: known(0))
        assert not known(1)
        there = ["127.0.0.1", "127.0.0.2"]
        await eventually(lambda: known(0) and known(1))
        there = ["127.0.0.2"]
        await eventually(lambda: not known(0), 5)
        assert known(1)
        there = []
        await asyncio.sleep(1)
        assert known(1)
        await mine.close()
        await eventually(lambda: not known(1), 5)
    await joining.stop()


async def test_another_process_at_the_same_address_starts_with_a_clean_breaker(serve_router: ServeRouter):
    port = free_port()
    router = await serve_router([ScriptedWorker()], poll_interval_s=60, breaker_failures=1)
    async with registry(router, port, lease_s=30):
        joining = await ScriptedWorker().start()
        for _ in range(2):
            mine = registration("decode", port)
            joining.status.incarnation.id = mine._request.incarnation.id
            mine.start(joining.address)
            await eventually(
                lambda: any(w.can_take and w.address == joining.address for w in router.state.workers.decode)
            )
            (worker,) = [w for w in router.state.workers.decode if w.address == joining.address]
            assert worker.breaker.state == "closed"
            worker.breaker.failed()
            assert not worker.can_take
            for task in [*mine._resolving, *mine._tasks.values()]:
                task.cancel()  # it dies without a word
        await joining.stop()


@pytest.mark.parametrize(
    ("service", "address", "field"),
    [("router", "h:1", "incarnation.service"), ("", "h:1", "incarnation.service"), ("decode", "nowhere", "address")],
)
async def test_what_is_no_worker_is_refused_by_name(serve_router: ServeRouter, service: str, address: str, field: str):
    port = free_port()
    router = await serve_router([ScriptedWorker()])
    async with registry(router, port, lease_s=1), open_channel(f"127.0.0.1:{port}") as channel:
        request = registry_pb2.RegisterRequest(incarnation=common_pb2.Incarnation(service=service), address=address)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await registry_pb2_grpc.RegistryStub(channel).Register(request)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert field in str(raised.value.details())


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"register_with": "nowhere"}, "register_with"),
        ({"register_with": "r:1", "advertise_address": "here"}, "advertise_address"),
        ({"register_with": "r:1", "host": "0.0.0.0"}, "advertise_address"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, str], part: str):
    with pytest.raises(ValueError, match=part):
        Registration(WorkerSettings(**settings), new_incarnation("decode"))


async def test_a_router_without_static_workers_serves_those_that_register(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    registry_port, port_file = free_port(), tmp_path / "port"
    flags = ["--prefill", "", "--decode", "", "--registry-port", str(registry_port), "--lease-s", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "router_service", "--model", str(tmp_path), "--port", "0", "--port-file", str(port_file), *flags],
        stderr=(tmp_path / "log").open("wb"),
    )  # fmt: skip
    worker = await ScriptedWorker().start()
    mine = [registration(role, registry_port) for role in ("prefill", "decode")]
    for each in mine:
        each.start(worker.address)
    async with asyncio.timeout(20):
        while not port_file.exists():
            await asyncio.sleep(0.05)
    async with httpx.AsyncClient(base_url=f"http://{port_file.read_text()}") as client:
        end = time.monotonic() + 10
        while (await client.get("/ready")).status_code != 200:
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            await asyncio.sleep(0.05)
        assert (await client.post("/v1/completions", json={"prompt": "x"})).json()["choices"][0]["text"] == "ok"
        await mine[1].close()
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    await mine[0].close()
    process.terminate()
    assert await asyncio.to_thread(process.wait, 10) == 0
    await worker.stop()
