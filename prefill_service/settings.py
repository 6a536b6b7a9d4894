"""Settings of the prefill service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from common.config import Port, Seconds, WorkerSettings
from common.kv.layout import LOGICAL_PAGE_TOKENS

Positive = Annotated[int, Field(gt=0)]


class PrefillSettings(WorkerSettings):
    """`dsv4-pd prefill --help` lists these; each is also an environment variable DSV4PD_PREFILL_<NAME>."""

    service: ClassVar[str] = "prefill"

    model: Path = Field(description="directory of the checkpoint: config.json, safetensors, tokenizer.json")
    model_name: str = Field("", description="name reported to others; empty: the directory's name")
    port: Port = Field(7001, description="gRPC port; 0 picks a free one")
    port_file: Path | None = Field(None, description="written with host:port once the server listens")
    metrics_port: Port = Field(0, description="HTTP port for Prometheus; 0 = off")
    threads: int = Field(0, ge=0, description="CPU threads for computing; 0 = all cores")

    chunk_tokens: int = Field(512, gt=0, multiple_of=LOGICAL_PAGE_TOKENS, description="tokens of a prompt a step")
    step_tokens: Positive = Field(1024, description="tokens of all prompts a step; one chunk goes in any case")
    kv_budget_tokens: Positive = Field(1 << 20, description="tokens of prompts being computed or sent at a time")
    max_queued: Positive = Field(256, description="requests that may wait; more get RESOURCE_EXHAUSTED")
    max_context_tokens: int = Field(0, ge=0, description="longest prompt; 0 = what model and KV budget allow")
    send_ring_bytes: Positive = Field(256 << 20, description="memory that packed pages wait in until they are sent")

    pipeline_stages: Positive = Field(1, description="processes among which the layers are divided")
    pipeline_layers: str = Field("", description="layers of each stage, comma separated; empty: as even as it goes")
    tensor_ranks: Positive = Field(1, description="processes of a stage, among which its pages are divided")
    rank: int = Field(0, ge=0, description="which process of the team this is; 0 leads and has the gRPC server")
    rendezvous: str = Field("", description="host:port at which the team meets; process 0 listens there")
    rendezvous_timeout_s: Seconds = Field(120, description="longest wait for the rest of the team")

    transfer_hostname: str = Field("127.0.0.1", description="this host's address for Mooncake peers")
    transfer_protocol: Literal["tcp", "rdma"] = Field("tcp", description="Mooncake transport")
    transfer_device: str = Field("", description="RDMA devices, comma separated; empty = all")
    transfer_min_port: Port = Field(0, description="least port Mooncake may open; 0 = its own range")
    transfer_max_port: Port = Field(0, description="greatest port Mooncake may open")
    transfer_gid_index: int = Field(-1, ge=-1, description="GID index of RDMA devices; -1 = Mooncake's choice")
    transfer_ib_port: int = Field(0, ge=0, description="port of RDMA devices; 0 = any that is active")
    transfer_numa_node: int = Field(-1, ge=-1, description="use RDMA devices of this NUMA node only; -1 = any")
    transfer_register_bytes: Positive = Field(1 << 30, description="memory is registered in pieces of so many bytes")
    transfer_batch_runs: Positive = Field(16, description="writes posted at once to a peer")
    transfer_batch_bytes: Positive = Field(64 << 20, description="bytes posted at once to a peer")
    transfer_run_bytes: Positive = Field(8 << 20, description="longest single write")
    transfer_bytes_per_s: int = Field(0, ge=0, description="most bytes a second to one peer; 0 = no bound")

    queue_timeout_s: Seconds = Field(120, description="longest wait before computing starts")
    prefill_timeout_s: Seconds = Field(600, description="longest time from start to last byte sent")
    transfer_timeout_s: Seconds = Field(30, description="longest time for one post of pages")
    drain_timeout_s: Seconds = Field(30, description="on SIGTERM, longest wait for running requests")
    profile_directory: Path = Field(Path("profiles"), description="where StartProfile puts its traces")
