"""Operating running workers: every Admin call through `dsv4-pd admin`, reflection, and health that follows readiness."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from typer.testing import CliRunner, Result

from common.cli.main import app
from tests.support.cluster import Cluster
from tests.support.processes import Service

pytestmark = pytest.mark.system
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("admin")
    flags = ("--profile-directory", str(folder / "profiles"))
    made = Cluster(checkpoint, folder, prefill_flags=flags, decode_flags=flags).start()
    yield made
    made.stop()


@pytest.fixture(params=["prefill", "decode"])
def worker(cluster: Cluster, request: pytest.FixtureRequest) -> Service:
    return getattr(cluster, request.param)


def admin(worker: Service, *arguments: str, as_json: bool = False) -> Result:
    flags = ["--json"] if as_json else []
    return CliRunner().invoke(app, ["admin", "--address", worker.address, *flags, *arguments], env={"COLUMNS": "200"})


def told(worker: Service, *arguments: str) -> dict:
    done = admin(worker, *arguments, as_json=True)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_status_shows_pools_phases_and_versions(worker: Service, cluster: Cluster):
    reply = told(worker, "status", "--check-integrity")
    role = worker.package.removesuffix("_service")
    assert (reply["incarnation"]["service"], reply["ready"], reply["draining"]) == (role, True, False)
    assert {p["name"] for p in reply["pools"]} >= ({"host_c4", "hot"} if role == "decode" else {"send_ring"})
    # Zeros are shown too: a script can rely on the key.
    assert all(p["used"] == "0" for p in reply["pools"])
    shown = admin(worker, "status").stdout
    assert all(part in shown for part in (reply["incarnation"]["id"], "quarantined", "longest context", "queued"))


def test_requests_are_listed_and_aborted_by_their_exact_id(cluster: Cluster):
    ended: list[object] = []

    def ask() -> None:
        try:
            ended.append(cluster.generate("to-abort", list(range(5, 205)), max_tokens=4000).finished.reason)
        except grpc.RpcError as error:
            ended.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    cluster.wait_phase(cluster.decode, "running")
    (shown,) = told(cluster.decode, "requests")["requests"]
    assert (shown["key"]["request_id"], shown["prompt_tokens"], shown["phase"]) == ("to-abort", 200, "running")
    assert "to-abort" in admin(cluster.decode, "requests").stdout
    unknown = admin(cluster.decode, "abort", "to-abor")
    assert (unknown.exit_code, "NOT_FOUND" in unknown.stderr) == (1, True)
    empty = admin(cluster.decode, "abort", "")
    assert (empty.exit_code, "INVALID_ARGUMENT" in empty.stderr) == (1, True)
    assert told(cluster.decode, "abort", "to-abort") == {"aborted": 1}
    thread.join(10)
    assert ended == [3]  # FINISH_REASON_ABORT
    cluster.wait_idle(5)
    assert told(cluster.decode, "requests") == {"requests": []}
    assert "no requests" in admin(cluster.prefill, "requests").stdout


def test_drain_ends_readiness_and_new_work_and_resume_brings_them_back(worker: Service, cluster: Cluster):
    with grpc.insecure_channel(worker.address) as channel:
        states: list[int] = []
        seen = threading.Event()

        def watch() -> None:
            # Watch, as load balancers use it: every change is pushed.
            for reply in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30):
                states.append(reply.status)
                seen.set()
                if len(states) == 3:
                    return

        thread = threading.Thread(target=watch)
        thread.start()
        assert seen.wait(5)
        assert told(worker, "drain", "--grace-s", "1") == {"running": 0}
        assert not worker.serving()
        assert (worker.status().draining, worker.status().ready) == (True, False)
        with pytest.raises(grpc.RpcError) as raised:
            cluster.generate("while-draining", [5, 6, 7])
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert told(worker, "resume") == {}
        thread.join(10)
    assert states == [SERVING, NOT_SERVING, SERVING]
    assert len(cluster.generate("after", [5, 6, 7], max_tokens=3).tokens) == 3


def test_flush_layout_and_log_level(worker: Service, cluster: Cluster):
    assert told(worker, "flush-cache") == {"pages_freed": "0"}
    layout = told(worker, "layout")
    assert (layout["layout"]["logical_page_tokens"], layout["layout"]["sliding_window"]) == (256, 128)
    assert bool(layout["regions"]) == (worker is cluster.decode)
    assert "c4_page_bytes" in admin(worker, "layout").stdout
    assert told(worker, "log-level", "debug") == {"previous": "info"}
    assert "it was debug" in admin(worker, "log-level", "info").stdout
    wrong = admin(worker, "log-level", "loud")
    assert (wrong.exit_code, "'loud' is not one of" in wrong.stderr) == (1, True)


def test_a_profile_is_a_trace_of_the_engine_on_the_workers_disk(worker: Service, cluster: Cluster):
    """A profile stopped on another thread than the one that started it used to kill the worker."""
    assert told(worker, "start-profile")["profile_id"]
    cluster.generate("profiled", [5, 6, 7], max_tokens=3)
    again = admin(worker, "start-profile")
    assert (again.exit_code, "is running" in again.stderr) == (1, True)
    path = Path(told(worker, "stop-profile")["path"])
    assert any(event.get("name") == "aten::mm" for event in json.loads(path.read_text())["traceEvents"])
    none = admin(worker, "stop-profile")
    assert (none.exit_code, "NOT_FOUND" in none.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (("--address", "127.0.0.1:1", "status"), 1, "UNAVAILABLE"),
        (("--tls-ca", "/nowhere", "status"), 2, "tls_cert, tls_key"),
        (("--token-file", "/nowhere", "status"), 2, "/nowhere"),
        (("frob",), 2, "frob"),
    ],
)
def test_what_the_command_cannot_do_is_one_line(arguments: tuple[str, ...], status: int, part: str):
    done = CliRunner().invoke(app, ["admin", *arguments])
    assert (done.exit_code, part in done.output) == (status, True)


def test_a_client_without_our_files_can_call_through_reflection(worker: Service):
    """What grpcurl does: list the services, fetch their descriptors, build the messages, call."""
    role = worker.package.removesuffix("_service").capitalize()
    with grpc.insecure_channel(worker.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {f"dsv4pd.v1.{role}", "dsv4pd.v1.Admin", "grpc.health.v1.Health"} <= set(database.get_services())
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("dsv4pd.v1.Admin").FindMethodByName("GetStatus")
        reply_class = GetMessageClass(method.output_type)
        call = channel.unary_unary(
            "/dsv4pd.v1.Admin/GetStatus",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply_class.FromString,
        )
        reply = call(GetMessageClass(method.input_type)(check_integrity=True), timeout=5)
        assert reply.ready
        assert reply.incarnation.service == role.lower()
        # Every service that is shown can be described.
        for name in database.get_services():
            assert pool.FindServiceByName(name).methods


def test_health_names_every_service(worker: Service):
    role = worker.package.removesuffix("_service").capitalize()
    with grpc.insecure_channel(worker.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", f"dsv4pd.v1.{role}", "dsv4pd.v1.Admin"):
            assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == SERVING
        with pytest.raises(grpc.RpcError) as raised:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND
