"""One worker as the router sees it: its channel, its last status, what was sent to it since, its breaker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import grpc.aio

from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc, decode_pb2_grpc
from router_service.breaker import Breaker

Role = Literal["prefill", "decode"]


@dataclass(eq=False)
class Worker:
    """One address. `load` is what its last status said (decode: free host pages, prefill: tokens to compute),
    `outstanding` what this router has sent since, in the same unit; `requests` run there now."""

    role: Role
    address: str
    channel: grpc.aio.Channel
    static: bool
    breaker: Breaker = field(default_factory=Breaker)
    usable: bool = False
    leaving: bool = False
    load: float = 0.0
    outstanding: float = 0.0
    context: int = 0
    requests: int = 0
    problem: str = "not asked yet"
    incarnation: str = ""
    admin: admin_pb2_grpc.AdminStub = field(init=False)
    decode: decode_pb2_grpc.DecodeStub = field(init=False)

    def __post_init__(self) -> None:
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        self.decode = decode_pb2_grpc.DecodeStub(self.channel)

    @property
    def can_take(self) -> bool:
        """Whether a request may be sent to it now."""
        return self.usable and not self.leaving and self.breaker.allows()

    @property
    def trouble(self) -> str:
        """Why not; empty when it may."""
        if self.can_take:
            return ""
        return self.problem or ("leaving" if self.leaving else "its last requests failed")

    def answered(self, status: admin_pb2.GetStatusReply) -> None:
        """Takes a status over."""
        if status.incarnation.id != self.incarnation:
            self.breaker.reset()
            self.incarnation = status.incarnation.id
        self.usable = status.ready and not status.draining
        self.problem = "" if self.usable else "draining" if status.draining else "not ready"
        self.context = status.max_context_tokens
        self.load = _free_host_pages(status) if self.role == "decode" else _queued_tokens(status)
        self.outstanding = 0.0

    def lost(self, problem: str) -> None:
        """Not to be chosen until it answers a poll."""
        self.usable = False
        self.problem = problem


def _free_host_pages(status: admin_pb2.GetStatusReply) -> float:
    return float(sum(pool.free + pool.cached for pool in status.pools if pool.name == "host_c4"))


def _queued_tokens(status: admin_pb2.GetStatusReply) -> float:
    return float(sum(phase.tokens for phase in status.phases if phase.phase in ("queued", "computing")))
