"""All three services with certificates, an API key and an admin role, as they would run on a shared network."""

import hashlib
import json
import socket
import ssl
import time
from pathlib import Path

import grpc
import httpx
import pytest
from typer.testing import CliRunner

from common.cli.main import app
from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc
from tests.support.certificates import Authority
from tests.support.processes import Service

pytestmark = pytest.mark.system
KEY, TOKEN = "sk-of-a-client", "adm-of-an-operator"


def sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def test_a_secured_system_serves_who_has_a_key_and_obeys_who_has_the_role(checkpoint: Path, tmp_path: Path):
    authority = Authority(tmp_path / "ca")
    https, operator = authority.sign("https"), authority.sign("operator")
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "client"\nsha256 = "{sha256(KEY)}"\n')
    common = ("--model", str(checkpoint))
    worker = ("--threads", "1", "--admin-token-sha256", sha256(TOKEN), "--admin-names", "operator")
    registry_port = _free_port()
    services = [
        Service("prefill_service", tmp_path, *common, *worker, *authority.sign("prefill").flags(), "--send-ring-bytes", str(32 << 20), "--register-with", f"127.0.0.1:{registry_port}"),
        Service("decode_service", tmp_path, *common, *worker, *authority.sign("decode").flags(), "--host-pages", "64", "--logical-pages", "64", "--register-with", f"127.0.0.1:{registry_port}"),
        Service("router_service", tmp_path, *common, *authority.sign("router").flags(), "--prefill", "", "--decode", "", "--registry-port", str(registry_port), "--api-keys", str(keys), "--https-cert", str(https.cert), "--https-key", str(https.key)),
    ]  # fmt: skip
    for service in services:
        service.launch()
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    with httpx.Client(verify=trusting, timeout=30, headers={"authorization": f"Bearer {KEY}"}) as client:
        url = _wait_ready(client, services[2])
        answer = client.post(f"{url}/v1/completions", json={"prompt": "def ", "max_tokens": 4, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert client.get(f"{url}/v1/models", headers={"authorization": ""}).status_code == 401
    decode = (tmp_path / "decode_service.port").read_text()
    with grpc.insecure_channel(decode) as channel, pytest.raises(grpc.RpcError):
        admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=2)
    target = ["admin", "--address", decode, "--json"]
    assert CliRunner().invoke(app, [*target, *operator.flags(), "requests"]).exit_code == 0
    router = authority.sign("some-router").flags()
    refused = CliRunner().invoke(app, [*target, *router, "drain"])
    assert (refused.exit_code, "PERMISSION_DENIED" in refused.stderr) == (1, True)
    allowed = CliRunner().invoke(app, [*target, *router, "flush-cache"], env={"DSV4PD_ADMIN_TOKEN": TOKEN})
    assert json.loads(allowed.stdout) == {"pages_freed": "0"}
    assert [service.stop() for service in reversed(services)] == [0, 0, 0]
    logs = "".join(service.log.read_text() for service in services)
    assert not [secret for secret in (KEY, TOKEN, sha256(KEY), sha256(TOKEN), "PRIVATE KEY") if secret in logs]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_ready(client: httpx.Client, router: Service) -> str:
    port_file, end = router.folder / "router_service.port", time.monotonic() + 60
    while time.monotonic() < end:
        if port_file.exists():
            url = f"https://{port_file.read_text()}"
            if client.get(f"{url}/ready").status_code == 200:
                return url
        time.sleep(0.1)
    raise AssertionError(f"not ready: {router.log_tail()}")
