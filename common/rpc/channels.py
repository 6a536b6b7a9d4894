"""Channels and servers with the same options everywhere: bounded messages, keepalive, quick reconnects."""

from __future__ import annotations

from typing import Any

import grpc.aio

MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to "host:port" that tries again within a second after its peer went away."""
    options = [
        *_OPTIONS,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.http2.max_pings_without_data", 0),
        # A pool of its own: a channel to a restarted peer must not share a dead connection's backoff.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options=options)


def make_server() -> Any:
    """A grpc.aio server; refuses a port that another process listens on."""
    options = [
        *_OPTIONS,
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]
    return grpc.aio.server(options=options)
