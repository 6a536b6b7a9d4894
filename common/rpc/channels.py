"""Channels and servers with the same options everywhere: bounded messages, keepalive, quick reconnects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from common.rpc.tls import Tls

MAX_MESSAGE_BYTES = 64 << 20
EVENTS_AHEAD_BYTES = 64 << 10
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


def open_channel(address: str, tls: Tls | None = None, tls_name: str = "") -> grpc.aio.Channel:
    """A channel to "host:port" that tries again within a second after its peer went away. `tls_name`: the name in the
    peer's certificate, where it is not the host."""
    options: list[tuple[str, int | str]] = [
        *_OPTIONS,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.http2.max_pings_without_data", 0),
        # What callers receive are streams of small events: without a bound gRPC takes in megabytes of them for a
        # reader that stands still, as it measures the connection and not the reader.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", EVENTS_AHEAD_BYTES),
        # A pool of its own: a channel to a restarted peer must not share a dead connection's backoff.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if tls is not None:
        if tls_name:
            options.append(("grpc.ssl_target_name_override", tls_name))
        return grpc.aio.secure_channel(address, tls.client(), options=options)
    return grpc.aio.insecure_channel(address, options=options)


def open_blocking_channel(address: str, tls: Tls | None = None) -> grpc.Channel:
    """For command line tools."""
    if tls is not None:
        return grpc.secure_channel(address, tls.client(), options=_OPTIONS)
    return grpc.insecure_channel(address, options=_OPTIONS)


def make_server(interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> Any:
    """A grpc.aio server; refuses a port that another process listens on."""
    options = [
        *_OPTIONS,
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]
    return grpc.aio.server(options=options, interceptors=interceptors)


def listen(server: Any, host: str, port: int, tls: Tls | None = None) -> str:
    """Binds the port; returns "host:port". Raises OSError when it is taken."""
    try:
        if tls is not None:
            bound = server.add_secure_port(f"{host}:{port}", tls.server())
        else:
            bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"can't listen on {host}:{port}: {error}") from None
    return f"{host}:{bound}"
