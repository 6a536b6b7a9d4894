"""JSON logs on standard error: one line an event, with the request's id where there is one."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable

import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Level:
    """The level in force; the one mutable thing that loggers, made once and cached, look at."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.name = "info"


_level = _Level()


def configure_logging(service: str, level: str) -> None:
    """Sends structlog's and the standard library's records to standard error as JSON lines.

    `service` is in every line. Bind a request's id with structlog.contextvars.bind_contextvars.
    """
    set_log_level(level)

    def add_service(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    shared: list[Callable[..., structlog.typing.EventDict]] = [
        structlog.contextvars.merge_contextvars,
        add_service,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            _drop_below_level,
            *shared,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(_LEVELS[level])


def set_log_level(level: str) -> str:
    """Changes the least severe level that is logged; returns the one before. Raises ValueError."""
    if level not in _LEVELS:
        raise ValueError(f"log level {level!r} is not one of {sorted(_LEVELS)}")
    with _level.lock:
        previous, _level.name = _level.name, level
    logging.getLogger().setLevel(_LEVELS[level])
    return previous


def _drop_below_level(_: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    severity = _LEVELS.get("error" if method in ("exception", "critical") else method, logging.INFO)
    if severity < _LEVELS[_level.name]:
        raise structlog.DropEvent
    return event
