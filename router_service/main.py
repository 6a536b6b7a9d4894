"""Starts the router and ends it cleanly."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager

import structlog
import uvicorn
import uvloop

from common.logging import configure_logging
from common.model.config import ConfigError, ModelConfig
from common.model.tokenizer import load_tokenizer
from common.signals import ignore_signals, stop_on_signals
from common.tracing import Tracing
from router_service.app import RouterState, make_app
from router_service.bounded_http import bounded
from router_service.draining import drain
from router_service.registry_server import serve_registry
from router_service.settings import RouterSettings

# For connections that are still open when draining is over.
CLOSE_TIMEOUT_S = 1
SEND_BUFFER_BYTES = 256 << 10


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would close the door before running requests ended."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def main() -> None:
    """`python -m router_service`: serves until SIGTERM or SIGINT."""
    settings = RouterSettings.load()
    configure_logging("router", settings.log_level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
        ignore_signals()
    except (ConfigError, ValueError, OSError) as error:
        structlog.get_logger().error("router can't start", detail=str(error))
        sys.exit(1)


async def serve(settings: RouterSettings) -> None:
    if (settings.https_cert is None) != (settings.https_key is None):
        raise ValueError("https_cert and https_key belong together")
    stop = stop_on_signals()
    tracing = Tracing("router", settings.otlp_endpoint)
    config = ModelConfig.from_file(settings.model)
    state = RouterState(settings, config, load_tokenizer(settings.model, config))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by connections: left to itself the kernel holds megabytes for each client that does not read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listener.bind((settings.host, settings.port))
        # Only listening tells whether another process has the port.
        listener.listen()
    except OSError as error:
        raise OSError(f"can't listen on {settings.host}:{settings.port}: {error.strerror}") from None
    listener.set_inheritable(True)
    address = f"{settings.host}:{listener.getsockname()[1]}"
    server = _Server(
        uvicorn.Config(
            make_app(state),
            log_config=None,
            access_log=False,
            lifespan="on",
            http=bounded(settings.max_head_bytes, settings.head_timeout_s),
            ssl_certfile=settings.https_cert,
            ssl_keyfile=settings.https_key,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if settings.port_file is not None:
        partial = settings.port_file.with_suffix(".partial")
        partial.write_text(address, encoding="utf-8")
        partial.replace(settings.port_file)
    log = structlog.get_logger()
    log.info("router listens", address=address, model=state.model_name, workers_ready=state.workers.ready)
    registry = await serve_registry(settings, state.workers, state.tls)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
    left = await drain(state, settings.drain_notice_s, settings.drain_timeout_s)
    await registry.close()
    server.should_exit = True
    await serving
    await asyncio.to_thread(tracing.close)
    log.info("router stopped", requests_left=left)
