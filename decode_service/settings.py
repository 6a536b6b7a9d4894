"""Settings of the decode service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from common.config import Port, Seconds, WorkerSettings
from common.quantities import parse_bytes

AUTO = "auto"


def _budget(text: str) -> str:
    """Raises ValueError unless it is "auto" or a size."""
    if text != AUTO and parse_bytes(text) == 0:
        raise ValueError("a budget of no bytes holds no request")
    return text


Positive = Annotated[int, Field(gt=0)]
KVBudget = Annotated[str, AfterValidator(_budget)]


class DecodeSettings(WorkerSettings):
    """`dsv4-pd decode --help` lists these; each is also an environment variable DSV4PD_DECODE_<NAME>."""

    service: ClassVar[str] = "decode"

    model: Path = Field(description="directory of the checkpoint: config.json, safetensors, tokenizer.json")
    model_name: str = Field("", description="name reported to others; empty: the directory's name")
    port: Port = Field(7002, description="gRPC port; 0 picks a free one")
    port_file: Path | None = Field(None, description="written with host:port once the server listens")
    metrics_port: Port = Field(0, description="HTTP port for Prometheus; 0 = off")
    threads: int = Field(0, ge=0, description="CPU threads for computing; 0 = all cores")
    prefill_address: str = Field("", description="host:port of prefill for requests that name none")

    host_kv_budget: KVBudget = Field(
        AUTO, description="bytes of the host pool, such as 512GiB; auto: from free memory and cgroup limits"
    )
    device_kv_budget: KVBudget = Field(
        AUTO, description="bytes of all pools on the device, such as 64GiB; auto: from what is free beside the weights"
    )
    host_pages: Positive | None = Field(
        None, description="host C4 pages (256 tokens each), page-locked with a GPU; not set: as host_kv_budget allows"
    )
    logical_pages: Positive | None = Field(
        None,
        description="device pages (256 tokens each): index keys and C128 rows; not set: as device_kv_budget allows",
    )
    max_requests: Positive | None = Field(
        None,
        description="requests with memory at a time: hot, window and state slots; not set: 64, or fewer so that they "
        "take at most half of device_kv_budget",
    )
    max_batch: Positive = Field(32, description="requests decoded in one step")
    admission: Literal["direct", "staged"] = Field(
        "direct", description="C4 pages land in the host pool at once, or in device pages that are copied there"
    )
    staging_pages: Positive = Field(
        1024, description="with staged admission, device pages (256 tokens each) for prompts"
    )
    hot_entries: int = Field(0, ge=0, description="hot buffer rows of a request and C4 layer; 0 = 4 x index_topk")
    resident_pages: int | None = Field(
        None,
        ge=0,
        description="device pages (256 tokens each) for C4 rows of requests longer than the hot buffer; not set: what "
        "device_kv_budget leaves",
    )
    max_context_tokens: int = Field(0, ge=0, description="longest prompt + output; 0 = what model and pools allow")
    max_queued: Positive = Field(256, description="requests that may wait for memory; more get RESOURCE_EXHAUSTED")
    max_overtakes: int = Field(
        64, ge=0, description="later requests that may get memory before one that does not fit yet; 0 = strict order"
    )
    shuffle_allocators: int = Field(-1, ge=-1, description="seed that shuffles page and slot ids; -1 = in order")
    verify: bool = Field(True, description="check the digest of every page that lands")
    prefix_cache: Literal["off", "prompt", "all"] = Field(
        "prompt",
        description="which full pages of finished requests are kept for prompts that begin with the same tokens; all: "
        "output's too, whose last bits may differ from prefill's; needs verify",
    )

    transfer_hostname: str = Field("127.0.0.1", description="this host's address for Mooncake peers")
    transfer_protocol: Literal["tcp", "rdma"] = Field("tcp", description="Mooncake transport")
    transfer_device: str = Field("", description="RDMA devices, comma separated; empty = all")
    transfer_min_port: Port = Field(
        0,
        description="least port Mooncake may open; two a prefill process, fenced ones too; 0 = its own range",
    )
    transfer_max_port: Port = Field(0, description="greatest port Mooncake may open")
    transfer_gid_index: int = Field(-1, ge=-1, description="GID index of RDMA devices; -1 = Mooncake's choice")
    transfer_ib_port: int = Field(0, ge=0, description="port of RDMA devices; 0 = any that is active")
    transfer_numa_node: int = Field(-1, ge=-1, description="use RDMA devices of this NUMA node only; -1 = any")
    transfer_register_bytes: Positive = Field(1 << 30, description="memory is registered in pieces of so many bytes")

    queue_timeout_s: Seconds = Field(120, description="longest wait for memory")
    prefill_queue_timeout_s: Seconds = Field(120, description="longest wait in the prefill service's queue")
    prefill_timeout_s: Seconds = Field(600, description="longest time from prefill's start to its last byte")
    transfer_timeout_s: Seconds = Field(30, description="longest time for one post of pages")
    cancel_timeout_s: Seconds = Field(
        10, description="longest wait for prefill to say that a request is drained; then its session is fenced"
    )
    handshake_timeout_s: Seconds = Field(5, description="longest wait for a prefill service's Hello")
    quarantine_alarm_s: Seconds = Field(10, description="alarm when pages of a vanished writer are set aside longer")
    quarantine_max_share: float = Field(0.5, gt=0, le=1, description="alarm when more than this of a pool is set aside")
    drain_timeout_s: Seconds = Field(30, description="on SIGTERM, longest wait for running requests")
    profile_directory: Path = Field(Path("profiles"), description="where StartProfile puts its traces")
