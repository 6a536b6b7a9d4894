"""Starts the prefill service and ends it cleanly."""

from __future__ import annotations

import asyncio
import os
import sys

import structlog
import torch

from common.kernels.backend import open_backend
from common.logging import configure_logging
from common.model.checkpoint import CheckpointError, load_weights
from common.model.config import ConfigError, ModelConfig
from common.model.memory import keep_freed_memory
from common.model.model import DeepSeekV4Model
from common.model.model_hash import model_hash
from common.model.tokenizer import load_tokenizer
from common.rpc.gen.dsv4pd.v1 import admin_pb2_grpc, prefill_pb2_grpc
from common.rpc.identity import new_incarnation
from common.rpc.registration import Registration
from common.rpc.request_scope import RequestScope
from common.rpc.tls import Tls
from common.rpc.worker import STOP_GRACE_S, secured, serve_metrics
from common.signals import ignore_signals, stop_on_signals
from common.tracing import Tracing
from common.transfer.alignment import Place, places
from common.transfer.engine import EngineSettings, TransferEngine, TransferUnavailableError
from common.transfer.layout import HandoverLayout
from common.transfer.send_ring import SendRing
from common.transfer.sender import SenderSettings, TransferSender
from prefill_service.admin import PrefillAdmin
from prefill_service.engine import PrefillEngine
from prefill_service.follower import Follower
from prefill_service.metrics import PrefillMetrics
from prefill_service.packing import ChunkPlan
from prefill_service.scheduler import Scheduler
from prefill_service.server import PrefillServicer
from prefill_service.settings import PrefillSettings
from prefill_service.spans import METHOD, PrefillSpans
from prefill_service.team import Team
from prefill_service.team_leader import TeamLeader

SERVICES = ("dsv4pd.v1.Prefill", "dsv4pd.v1.Admin")

# A team that has lost a process can end nothing well any more.
LOST_GRACE_S = 0.5


class SettingsError(ValueError):
    """Settings that can't work together; the message names them."""


def main() -> None:
    """`python -m prefill_service`: serves until SIGTERM or SIGINT."""
    settings = PrefillSettings.load()
    configure_logging("prefill", settings.log_level)
    try:
        asyncio.run(serve(settings))
        ignore_signals()
    except (ConfigError, CheckpointError, ValueError, TransferUnavailableError, OSError, RuntimeError) as error:
        structlog.get_logger().error("prefill can't start", detail=str(error))
        sys.exit(1)


def max_context(settings: PrefillSettings, config: ModelConfig) -> int:
    """The longest prompt served. Raises SettingsError when more is asked than model or budget allow."""
    most = min(config.max_positions, settings.kv_budget_tokens)
    if settings.max_context_tokens > most:
        raise SettingsError(
            f"max_context_tokens = {settings.max_context_tokens}, but the model has {config.max_positions} positions "
            f"and kv_budget_tokens = {settings.kv_budget_tokens}"
        )
    return settings.max_context_tokens or most


def check_ring(settings: PrefillSettings, config: ModelConfig) -> None:
    """Raises SettingsError unless the largest span of a chunk fits the send ring."""
    ratios, chunk = config.compress_ratios, settings.chunk_tokens
    largest = max(ChunkPlan(ratios, end, 0, end).span_bytes for end in range(max(1, chunk - 128), chunk + 1))
    if largest > settings.send_ring_bytes:
        raise SettingsError(
            f"send_ring_bytes = {settings.send_ring_bytes}, but a chunk of {chunk} tokens needs {largest} bytes"
        )


def join_team(settings: PrefillSettings, config: ModelConfig) -> tuple[Team, Place] | tuple[None, None]:
    """The other processes and this one's place among them; none when there is one process. Raises SettingsError,
    TeamLostError."""
    if settings.pipeline_stages * settings.tensor_ranks == 1:
        return None, None
    try:
        sizes = [int(size) for size in settings.pipeline_layers.split(",") if size]
        place = places(config.num_layers, settings.pipeline_stages, settings.tensor_ranks, sizes)[settings.rank]
        team = Team(
            settings.pipeline_stages,
            settings.tensor_ranks,
            settings.rank,
            settings.rendezvous,
            settings.rendezvous_timeout_s,
        )
    except (ValueError, IndexError) as error:
        raise SettingsError(f"pipeline_stages, pipeline_layers, tensor_ranks, rank, rendezvous: {error}") from None
    return team, place


async def serve(settings: PrefillSettings) -> None:
    log = structlog.get_logger()
    stop = stop_on_signals()
    tracing = Tracing("prefill", settings.otlp_endpoint)
    tls = Tls.load(settings.tls_ca, settings.tls_cert, settings.tls_key)
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    keep_freed_memory()
    config = ModelConfig.from_file(settings.model)
    limit = max_context(settings, config)
    check_ring(settings, config)
    tokenizer = load_tokenizer(settings.model, config)
    layout = HandoverLayout.of(config, model_hash(settings.model), tokenizer.hash)
    backend = open_backend(settings.device)
    team, place = join_team(settings, config)
    layers = place.layers if place is not None else None
    model = DeepSeekV4Model(config, load_weights(settings.model, config), backend.device, layers=layers)
    incarnation = new_incarnation("prefill")
    registration = Registration(settings, incarnation, tls)
    metrics = PrefillMetrics()
    transfer = TransferEngine(
        EngineSettings(
            settings.transfer_hostname,
            settings.transfer_protocol,
            settings.transfer_device,
            settings.transfer_min_port,
            settings.transfer_max_port,
            int(settings.transfer_timeout_s) or 1,
            gid_index=settings.transfer_gid_index,
            ib_port=settings.transfer_ib_port,
            numa_node=settings.transfer_numa_node,
            register_bytes=settings.transfer_register_bytes,
        )
    )
    ring = SendRing(settings.send_ring_bytes, page_locked=not backend.on_host)
    transfer.register(ring.memory.data_ptr(), ring.size)
    sender = TransferSender(
        transfer,
        SenderSettings(
            settings.transfer_run_bytes,
            settings.transfer_batch_runs,
            settings.transfer_batch_bytes,
            max_bytes_per_s=settings.transfer_bytes_per_s,
        ),
        on_failure=lambda reason: metrics.transfer_failures.labels(reason).inc(),
    )
    if team is not None and place is not None and team.index:
        log.info("prefill follows", rank=team.index, layers=list(place.layers), tensor_rank=place.rank)
        await asyncio.to_thread(Follower(team, place, model, backend.kernels, ring, sender).run)
        drained = await asyncio.to_thread(sender.close, 5.0)
        transfer.close()
        log.info("prefill stopped", rank=team.index, transfers_drained=drained)
        return
    scheduler = Scheduler(
        config.compress_ratios, settings.chunk_tokens, settings.step_tokens, settings.kv_budget_tokens, place
    )
    loop = asyncio.get_running_loop()
    leader = None
    if team is not None:

        def lost_one() -> None:
            loop.call_soon_threadsafe(stop.set)

        leader = TeamLeader(team, settings.pipeline_stages > 1, config.vocab_size, lost_one)
    engine = PrefillEngine(model, backend.kernels, scheduler, ring, sender, metrics, settings.max_queued, leader)
    servicer = PrefillServicer(settings, config, layout, incarnation, engine, metrics, limit)
    worker = secured(settings, SERVICES, tls, RequestScope({METHOD: PrefillSpans}, traced=tracing.enabled))
    admin = PrefillAdmin(
        layout,
        settings.profile_directory,
        incarnation,
        engine,
        ring,
        sender,
        servicer,
        metrics,
        worker,
        settings.model_name or settings.model.resolve().name,
        transfer.session,
        limit,
    )
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, worker.server)
    admin_pb2_grpc.add_AdminServicer_to_server(admin, worker.server)
    metrics.ring_bytes.set_function(lambda: ring.used)
    for phase in ("queued", "computing", "sending"):
        metrics.requests.labels(phase).set_function(
            lambda phase=phase: sum(job.phase == phase for job in engine.jobs())
        )
    serve_metrics(settings.metrics_port, settings.host, metrics.registry)
    engine.start()
    address = await worker.start(settings.host, settings.port, settings.port_file)
    await worker.set_ready(True)
    registration.start(address)
    log.info("prefill ready", address=address, incarnation=incarnation.id, max_context_tokens=limit)
    await stop.wait()
    await registration.close()
    lost = leader is not None and leader.lost
    left = await admin.drain(LOST_GRACE_S if lost else settings.drain_timeout_s)
    engine.stop(5.0)
    if leader is not None and not lost:
        await asyncio.to_thread(leader.close, 5.0)
    drained = await asyncio.to_thread(sender.close, 5.0)
    transfer.close()
    await worker.stop(STOP_GRACE_S)
    await asyncio.to_thread(tracing.close)
    log.info("prefill stopped", requests_left=left, transfers_drained=drained)
    if lost:
        # Threads that wait for the lost process can't be ended, and keep the interpreter from ending.
        os._exit(1)
