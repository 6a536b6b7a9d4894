"""Starts the decode service and ends it cleanly."""

from __future__ import annotations

import asyncio
import os
import sys

import structlog
import torch

from common.kernels.backend import open_backend
from common.kv.footprint import Footprint
from common.kv.layout import C4_PAGE, LOGICAL_PAGE_TOKENS, logical_page_count
from common.kv.prefix import chain_seed
from common.kv.sizing import PoolSizes
from common.logging import configure_logging
from common.model.checkpoint import CheckpointError, load_weights
from common.model.config import ConfigError, ModelConfig
from common.model.memory import keep_freed_memory
from common.model.model import DeepSeekV4Model
from common.model.model_hash import model_hash
from common.model.tokenizer import load_tokenizer
from common.rpc.gen.dsv4pd.v1 import admin_pb2_grpc, decode_pb2_grpc
from common.rpc.identity import new_incarnation
from common.rpc.registration import Registration
from common.rpc.request_scope import RequestScope
from common.rpc.tls import Tls
from common.rpc.worker import STOP_GRACE_S, secured, serve_metrics
from common.signals import ignore_signals, stop_on_signals
from common.tracing import Tracing
from common.transfer.engine import EngineSettings, TransferEngine, TransferUnavailableError
from common.transfer.landed_memory import LandedMemory
from common.transfer.layout import HandoverLayout
from decode_service.admin import PHASES, DecodeAdmin
from decode_service.device_pools import DevicePools
from decode_service.engine import DecodeEngine
from decode_service.extent_allocator import FRAGMENTATION
from decode_service.hisparse import HiSparseCoordinator
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.landings import Landings
from decode_service.metrics import DecodeMetrics
from decode_service.pool_sizing import UNLIMITED, FreeMemory, check_limits, describe, pool_sizes
from decode_service.prefix_cache import PrefixCache
from decode_service.resources import ResourcePools
from decode_service.server import DecodeServicer
from decode_service.settings import DecodeSettings
from decode_service.spans import METHOD, GenerateSpans
from decode_service.staging import StagingPool

SERVICES = ("dsv4pd.v1.Decode", "dsv4pd.v1.Admin")
DEFAULT_HOT_TOPKS = 4


class SettingsError(ValueError):
    """Settings that can't work together; the message names them."""


def main() -> None:
    """`python -m decode_service`: serves until SIGTERM or SIGINT."""
    settings = DecodeSettings.load()
    configure_logging("decode", settings.log_level)
    try:
        asyncio.run(serve(settings))
        ignore_signals()
    except (ConfigError, CheckpointError, ValueError, TransferUnavailableError, OSError, RuntimeError) as error:
        structlog.get_logger().error("decode can't start", detail=str(error))
        sys.exit(1)


def max_context(settings: DecodeSettings, config: ModelConfig, sizes: PoolSizes) -> int:
    """The longest prompt + output served. Raises SettingsError when more is asked than model or pools allow."""
    most = min(config.max_positions, sizes.most_tokens())
    if settings.max_context_tokens > most:
        raise SettingsError(
            f"max_context_tokens = {settings.max_context_tokens}, but the model has {config.max_positions} positions "
            f"and host_pages = {sizes.host_pages}, logical_pages = {sizes.logical_pages} hold "
            f"{sizes.most_tokens()} tokens"
        )
    return settings.max_context_tokens or most


def hot_entries(settings: DecodeSettings, config: ModelConfig) -> int:
    """D, the hot buffer rows of a request. Raises SettingsError when it can't hold one selection."""
    entries = settings.hot_entries or DEFAULT_HOT_TOPKS * config.index_topk
    if entries < config.index_topk:
        raise SettingsError(
            f"hot_entries = {entries} is less than the model's index_topk = {config.index_topk}: one step's "
            "selection must fit"
        )
    return entries


async def serve(settings: DecodeSettings) -> None:
    log = structlog.get_logger()
    stop = stop_on_signals()
    tracing = Tracing("decode", settings.otlp_endpoint)
    tls = Tls.load(settings.tls_ca, settings.tls_cert, settings.tls_key)
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    keep_freed_memory()
    config = ModelConfig.from_file(settings.model)
    hot = hot_entries(settings, config)
    footprint = Footprint.of(config.compress_ratios, hot)
    # What is refused whatever memory there is, is refused before the weights are loaded.
    max_context(settings, config, pool_sizes(settings, config, footprint, UNLIMITED))
    tokenizer = load_tokenizer(settings.model, config)
    layout = HandoverLayout.of(config, model_hash(settings.model), tokenizer.hash)
    backend = open_backend(settings.device)
    kernels = backend.kernels
    model = DeepSeekV4Model(config, load_weights(settings.model, config), backend.device)
    memory = FreeMemory.read(backend)
    sizes = pool_sizes(settings, config, footprint, memory)
    limit = max_context(settings, config, sizes)
    check_limits(settings, footprint, sizes, memory)
    log.info("pools sized", **describe(sizes, limit))
    incarnation = new_incarnation("decode")
    registration = Registration(settings, incarnation, tls)
    metrics = DecodeMetrics()
    seed = settings.shuffle_allocators if settings.shuffle_allocators >= 0 else None
    host = DeepSeekV4PagedHostPool(config.layers_of(4), sizes.host_pages, kernels, seed, not backend.on_host)
    device = DevicePools.of(config, sizes.logical_pages, sizes.requests, seed, backend.device)
    hisparse = HiSparseCoordinator(
        host, kernels, sizes.requests, hot, seed, backend.device, sizes.resident_pages,
        logical_page_count(limit),
    )  # fmt: skip
    staging = None
    if sizes.staging_pages:
        staging = StagingPool(config.layers_of(4), sizes.staging_pages, kernels, seed, backend.device)
    prefix = None
    if settings.prefix_cache != "off" and settings.verify:
        chain = chain_seed(layout.model_hash, layout.tokenizer_hash)
        prefix = PrefixCache(host.allocator, device.logical, chain, keeps_output=settings.prefix_cache == "all")
    elif settings.prefix_cache != "off":
        log.warning("prefix cache off: without verify nobody knows what the pages hold")
    pools = ResourcePools(host, device, hisparse.slots, staging, prefix, hisparse.resident.allocator)
    regions = device.regions(host, staging).in_pieces(settings.transfer_register_bytes)
    transfer = EngineSettings(
        settings.transfer_hostname,
        settings.transfer_protocol,
        settings.transfer_device,
        settings.transfer_min_port,
        settings.transfer_max_port,
        gid_index=settings.transfer_gid_index,
        ib_port=settings.transfer_ib_port,
        numa_node=settings.transfer_numa_node,
        register_bytes=settings.transfer_register_bytes,
    )
    landings = Landings(lambda: TransferEngine(transfer), regions)
    engine = DecodeEngine(
        model,
        kernels,
        device,
        hisparse,
        pools,
        metrics,
        settings.max_batch,
        settings.max_queued,
        limit,
        (staging, host) if staging is not None else None,
        settings.max_overtakes,
    )
    landed = LandedMemory([*device.buffers(), *(staging.buffers.values() if staging is not None else ())])
    servicer = DecodeServicer(settings, config, layout, incarnation, engine, regions, landings, metrics, landed, tls)
    worker = secured(settings, SERVICES, tls, RequestScope({METHOD: GenerateSpans}, traced=tracing.enabled))
    item_bytes = {
        "host_c4": footprint.host_page,
        "logical": footprint.logical_page,
        "window": footprint.window_slot,
        "state": footprint.state_slot,
        "hot": footprint.hot_slot + footprint.hot_table,
        "resident": footprint.host_page,
        "staging": footprint.host_page if staging is not None else 0,
    }
    admin = DecodeAdmin(
        layout,
        regions,
        settings.profile_directory,
        incarnation,
        engine,
        servicer,
        worker,
        settings.model_name or settings.model.resolve().name,
        landings,
        metrics,
        limit,
        item_bytes,
    )
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, worker.server)
    admin_pb2_grpc.add_AdminServicer_to_server(admin, worker.server)
    _publish(metrics, engine)
    metrics.fences.set_function(lambda: landings.fences)
    metrics.quarantine_alarm.set_function(lambda: bool(servicer.quarantine_alarm()))
    serve_metrics(settings.metrics_port, settings.host, metrics.registry)
    engine.start()
    address = await worker.start(settings.host, settings.port, settings.port_file)
    await worker.set_ready(True)
    registration.start(address)
    log.info(
        "decode ready",
        address=address,
        incarnation=incarnation.id,
        max_context_tokens=limit,
        hot_entries=hot,
        host_tokens=sizes.host_pages * C4_PAGE.rows * 4,
        device_tokens=sizes.logical_pages * LOGICAL_PAGE_TOKENS,
        pool_bytes={use.name: use.total * item_bytes[use.name] for use in pools.use()},
    )
    await stop.wait()
    await registration.close()
    left = await admin.drain(settings.drain_timeout_s)
    # Unregister before anything else goes: no peer may write into memory that is being given back.
    landings.close()
    await servicer.close()
    await asyncio.to_thread(engine.stop, 5.0)
    await worker.stop(STOP_GRACE_S)
    await asyncio.to_thread(tracing.close)
    log.info("decode stopped", requests_left=left)


def _publish(metrics: DecodeMetrics, engine: DecodeEngine) -> None:
    """Gauges read the engine when they are scraped."""
    for phase in PHASES:
        metrics.requests.labels(phase).set_function(
            lambda phase=phase: sum(r.phase == phase for r in engine.requests())
        )
    for index, use in enumerate(engine.pools.use()):
        for state in ("free", "used", "quarantined", "cached"):
            metrics.pool.labels(use.name, state).set_function(
                lambda index=index, state=state: getattr(engine.pools.use()[index], state)
            )
    for name in engine.pools.fragmentation():
        for what, read in FRAGMENTATION.items():
            metrics.fragmentation.labels(name, what).set_function(
                lambda name=name, read=read: read(engine.pools.fragmentation()[name])
            )
    prefix = engine.pools.prefix
    if prefix is not None:
        for what in ("hits", "misses", "hit_pages", "evictions"):
            metrics.prefix.labels(what).set_function(lambda what=what: getattr(prefix.counters, what))
    for what in ("resident", "hits", "misses", "backups", "loads", "spills"):
        metrics.hot.labels(what).set_function(lambda what=what: getattr(engine.hisparse.counters, what))
