"""Settings of the router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from common.addresses import parse_addresses
from common.config import Port, Seconds, ServiceSettings

Positive = Annotated[int, Field(gt=0)]


class RouterSettings(ServiceSettings):
    """`dsv4-pd router --help` lists these; each is also an environment variable DSV4PD_ROUTER_<NAME>."""

    service: ClassVar[str] = "router"

    model: Path = Field(description="directory of the checkpoint: config.json and tokenizer.json are read")
    model_name: str = Field("", description="name in /v1/models; empty: the directory's name")
    port: Port = Field(8000, description="HTTP port; 0 picks a free one")
    port_file: Path | None = Field(None, description="written with host:port once the server listens")
    prefill: str = Field(
        "127.0.0.1:7001", description="prefill workers, host:port, comma separated; may be empty with a registry_port"
    )
    decode: str = Field(
        "127.0.0.1:7002", description="decode workers, host:port, comma separated; may be empty with a registry_port"
    )
    registry_port: Port = Field(0, description="gRPC port where workers register (their register_with); 0 = off")
    registry_host: str = Field("", description="address of the registry; empty: the host setting's")
    lease_s: Seconds = Field(10, description="a registered worker that sends no heartbeat for this long is forgotten")
    poll_interval_s: Seconds = Field(0.5, description="how often workers are asked for their state")
    poll_timeout_s: Seconds = Field(2.0, description="a worker that does not answer in this time is not used")
    queue_timeout_s: Seconds = Field(120, description="longest wait for memory on a decode worker")
    event_timeout_s: Seconds = Field(1200, description="longest silence of a decode worker within a request")
    max_in_flight: Positive = Field(1024, description="HTTP requests at a time; more get 429")
    max_dispatched: Positive = Field(
        1024, description="choices at the workers at a time; more wait, lower priority values first"
    )
    max_waiting: int = Field(1024, ge=0, description="choices that may wait for that; more get 429")
    breaker_failures: Positive = Field(5, description="failures in a row after which a worker is left alone")
    breaker_open_s: Seconds = Field(
        5, description="for this long, up to 8 times longer when it fails again; then one request tries"
    )
    prefix_affinity_tokens: int = Field(
        0, ge=0, description="prompts that begin with the same so many tokens go to the same prefill worker; 0 = off"
    )
    affinity_slack_tokens: int = Field(
        4096,
        ge=0,
        description="tokens more than the least busy prefill worker that affinity (prefix or x-session-id) may cost",
    )
    api_keys: Path | None = Field(None, description="TOML file of API keys (dsv4-pd keys new NAME); none: all may call")
    https_cert: Path | None = Field(None, description="certificate chain for HTTPS, PEM; with https_key HTTP is off")
    https_key: Path | None = Field(None, description="its key, PEM")
    max_head_bytes: Positive = Field(32 << 10, description="longest request line and headers; more get 431")
    head_timeout_s: Seconds = Field(10, description="longest time for the request line and headers to come")
    max_body_bytes: Positive = Field(32 << 20, description="longest request body")
    drain_notice_s: float = Field(
        0, ge=0, description="on SIGTERM, not ready for this long before requests are refused: for balancers to notice"
    )
    drain_timeout_s: Seconds = Field(30, description="on SIGTERM, longest wait for running requests")

    def addresses(self, role: str) -> tuple[str, ...]:
        """The worker list of "prefill" or "decode". Raises ValueError for what is not host:port."""
        text: str = getattr(self, role)
        found = parse_addresses(role, text)
        if not found and not self.registry_port:
            raise ValueError(f"{role} names no worker")
        return found
