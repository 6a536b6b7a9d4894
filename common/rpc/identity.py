"""Who a process is: drawn once at start, another one after every restart."""

from __future__ import annotations

import secrets
import time

from common.rpc.gen.dsv4pd.v1 import common_pb2


def new_incarnation(service: str) -> common_pb2.Incarnation:
    return common_pb2.Incarnation(service=service, id=secrets.token_hex(16), started_unix_ns=time.time_ns())
