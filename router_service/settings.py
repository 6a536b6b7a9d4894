"""Settings of the router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from common.config import Port, Seconds, ServiceSettings

Positive = Annotated[int, Field(gt=0)]


class RouterSettings(ServiceSettings):
    """`dsv4-pd router --help` lists these; each is also an environment variable DSV4PD_ROUTER_<NAME>."""

    service: ClassVar[str] = "router"

    model: Path = Field(description="directory of the checkpoint: config.json and tokenizer.json are read")
    model_name: str = Field("", description="name in /v1/models; empty: the directory's name")
    port: Port = Field(8000, description="HTTP port; 0 picks a free one")
    port_file: Path | None = Field(None, description="written with host:port once the server listens")
    prefill: str = Field("127.0.0.1:7001", description="prefill workers, host:port, comma separated")
    decode: str = Field("127.0.0.1:7002", description="decode workers, host:port, comma separated")
    poll_interval_s: Seconds = Field(0.5, description="how often workers are asked for their state")
    poll_timeout_s: Seconds = Field(2.0, description="a worker that does not answer in this time is not used")
    queue_timeout_s: Seconds = Field(120, description="longest wait for memory on a decode worker")
    event_timeout_s: Seconds = Field(1200, description="longest silence of a decode worker within a request")
    max_in_flight: Positive = Field(1024, description="HTTP requests at a time; more get 429")
    max_body_bytes: Positive = Field(32 << 20, description="longest request body")
    drain_timeout_s: Seconds = Field(30, description="on SIGTERM, longest wait for running requests")

    def addresses(self, role: str) -> tuple[str, ...]:
        """The worker list of "prefill" or "decode". Raises ValueError for what is not host:port."""
        text: str = getattr(self, role)
        found = tuple(part.strip() for part in text.split(",") if part.strip())
        for address in found:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
                raise ValueError(f"{role} = {text!r}: {address!r} is not host:port")
        if not found:
            raise ValueError(f"{role} names no worker")
        return found
