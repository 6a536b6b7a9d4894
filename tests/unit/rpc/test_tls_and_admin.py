"""Mutual TLS between processes, and who may make admin calls: real gRPC servers, certificates made by openssl."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from common.config import WorkerSettings
from common.rpc.admin_guard import AdminRole
from common.rpc.channels import open_channel
from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc
from common.rpc.request_scope import RequestScope
from common.rpc.tls import Tls
from common.rpc.worker import secured
from tests.support.certificates import Authority, Signed

TOKEN = "adm-secret"
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()


class Admin(admin_pb2_grpc.AdminServicer):
    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Any) -> admin_pb2.GetStatusReply:
        return admin_pb2.GetStatusReply(ready=True)

    async def Resume(self, request: admin_pb2.ResumeRequest, context: Any) -> admin_pb2.ResumeReply:
        return admin_pb2.ResumeReply()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


def tls(signed: Signed) -> Tls:
    loaded = Tls.load(signed.ca, signed.cert, signed.key)
    assert loaded is not None
    return loaded


@asynccontextmanager
async def serve(settings: WorkerSettings) -> AsyncIterator[str]:
    own = Tls.load(settings.tls_ca, settings.tls_cert, settings.tls_key)
    server = secured(settings, ["dsv4pd.v1.Admin"], own, RequestScope({}, traced=False))
    admin_pb2_grpc.add_AdminServicer_to_server(Admin(), server.server)
    yield await server.start("127.0.0.1", 0, None)
    await server.stop(0)


async def codes(address: str, own: Tls | None = None, token: str = "") -> tuple[str, str]:
    """How GetStatus and Resume end."""
    found: list[str] = []
    async with open_channel(address, own) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        for call, request in (
            (admin.GetStatus, admin_pb2.GetStatusRequest()),
            (admin.Resume, admin_pb2.ResumeRequest()),
        ):
            try:
                await call(request, timeout=3, metadata=metadata)
                found.append("OK")
            except grpc.aio.AioRpcError as error:
                found.append(error.code().name)
    return found[0], found[1]


async def test_without_tls_and_token_everybody_on_the_host_is_an_administrator():
    async with serve(WorkerSettings()) as address:
        assert await codes(address) == ("OK", "OK")


async def test_a_token_makes_the_role_and_status_stays_open_to_routers():
    async with serve(WorkerSettings(admin_token_sha256=DIGEST.upper())) as address:
        assert await codes(address) == ("OK", "PERMISSION_DENIED")
        assert await codes(address, token="wrong") == ("OK", "PERMISSION_DENIED")
        assert await codes(address, token=DIGEST) == ("OK", "PERMISSION_DENIED")
        assert await codes(address, token=TOKEN) == ("OK", "OK")


async def test_with_tls_only_callers_of_the_same_authority_come_in(authority: Authority, tmp_path: Path):
    own, peer = authority.sign("decode"), authority.sign("router")
    stranger = Authority(tmp_path / "theirs").sign("router")
    async with serve(WorkerSettings(**own.settings())) as address:
        assert (await codes(address, tls(peer)))[0] == "OK"
        assert (await codes(address))[0] == "UNAVAILABLE"
        assert (await codes(address, tls(stranger)))[0] == "UNAVAILABLE"
        # One that trusts us, but is signed by somebody else.
        mixed = Tls(authority.ca.read_bytes(), stranger.cert.read_bytes(), stranger.key.read_bytes())
        assert (await codes(address, mixed))[0] == "UNAVAILABLE"
        no_certificate = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        async with grpc.aio.secure_channel(address, no_certificate) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=3)
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_with_tls_a_peer_is_no_administrator_unless_its_certificate_is_named(authority: Authority):
    own, router, operator = (authority.sign(name) for name in ("worker", "some-router", "operator"))
    async with serve(WorkerSettings(**own.settings())) as address:
        assert await codes(address, tls(operator)) == ("OK", "PERMISSION_DENIED")
    named = WorkerSettings(**own.settings(), admin_names="operator, other", admin_token_sha256=DIGEST)
    async with serve(named) as address:
        assert await codes(address, tls(operator)) == ("OK", "OK")
        assert await codes(address, tls(router)) == ("OK", "PERMISSION_DENIED")
        assert await codes(address, tls(router), token=TOKEN) == ("OK", "OK")


async def test_a_refused_admin_call_is_logged_without_its_token(capfd: pytest.CaptureFixture[str]):
    async with serve(WorkerSettings(admin_token_sha256=DIGEST)) as address:
        await codes(address, token="a-wrong-secret")
        await codes(address, token=TOKEN)
    shown = "".join(capfd.readouterr())
    assert "admin call refused" in shown
    assert "a-wrong-secret" not in shown
    assert TOKEN not in shown


@pytest.mark.parametrize(
    ("files", "part"),
    [(("a", None, None), "tls_cert, tls_key"), ((None, "b", "c"), "no tls_ca"), (("a", "b", None), "no tls_key")],
)
def test_half_of_a_tls_setting_is_refused_by_name(files: tuple[str | None, ...], part: str):
    with pytest.raises(ValueError, match=part):
        Tls.load(*(None if name is None else Path(name) for name in files))


def test_admin_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="64 hex digits"):
        AdminRole.of("secret-itself", "", tls=True)
    with pytest.raises(ValueError, match="admin_names needs tls"):
        AdminRole.of("", "operator", tls=False)


def test_a_key_is_not_shown_when_tls_is_printed(authority: Authority):
    assert "PRIVATE KEY" not in repr(tls(authority.sign("shown")))
