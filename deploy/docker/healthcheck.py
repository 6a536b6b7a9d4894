"""Exit status 0 when the service of this container can take requests: healthcheck.py prefill|decode|router.

A worker is asked by gRPC's health service, a router by /ready. Ports and certificates are read from the variables that
the service itself reads.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request
from pathlib import Path

TIMEOUT_S = 3.0


def setting(service: str, name: str) -> str:
    return os.environ.get(f"DSV4PD_{service.upper()}_{name}", "")


def router_is_ready() -> bool:
    secure = bool(setting("router", "HTTPS_CERT"))
    # The certificate names the outside address, not this one, and nothing secret is sent.
    context = ssl._create_unverified_context() if secure else None  # noqa: S323
    url = f"{'https' if secure else 'http'}://127.0.0.1:{setting('router', 'PORT')}/ready"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as answer:  # noqa: S310
            return answer.status == 200
    except OSError as error:
        print(error, file=sys.stderr)
        return False


def worker_is_ready(service: str) -> bool:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    address = f"127.0.0.1:{setting(service, 'PORT')}"
    files = [setting(service, f"TLS_{part}") for part in ("CA", "KEY", "CERT")]
    if all(files):
        ca, key, certificate = (Path(file).read_bytes() for file in files)
        # The worker's certificate is our own: its name is what we are called outside.
        name = setting(service, "ADVERTISE_ADDRESS").rpartition(":")[0] or "localhost"
        channel = grpc.secure_channel(
            address,
            grpc.ssl_channel_credentials(ca, key, certificate),
            [("grpc.ssl_target_name_override", name)],
        )
    else:
        channel = grpc.insecure_channel(address)
    try:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        print(error, file=sys.stderr)
        return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING


if __name__ == "__main__":
    role = sys.argv[1]
    sys.exit(0 if (router_is_ready() if role == "router" else worker_is_ready(role)) else 1)
