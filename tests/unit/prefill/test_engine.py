"""Cancelling: after the answer to a Cancel nothing of the request is ever written, whichever message came first."""

from typing import Any

import pytest

from common.errors import ErrorReason, ServiceError
from common.transfer.send_ring import SendRing
from common.transfer.sender import Post
from prefill_service import engine as engine_module
from prefill_service.engine import PrefillEngine
from prefill_service.job import Event, FailedEvent, SpanUse
from prefill_service.metrics import PrefillMetrics
from prefill_service.scheduler import Scheduler
from tests.unit.prefill.test_scheduler import make_job


class RecordingSender:
    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def cancel(self, key: str) -> None:
        self.cancelled.append(key)

    def forget(self, key: str) -> None: ...


def make_engine() -> PrefillEngine:
    """Not started: nothing is computed here."""
    nothing: Any = None
    sender: Any = RecordingSender()
    return PrefillEngine(nothing, nothing, Scheduler((0,), 256, 256, 1000), nothing, sender, PrefillMetrics(), 8)


def test_a_request_that_comes_after_its_own_cancel_is_refused():
    engine = make_engine()
    assert engine.cancel("a#1") is None
    with pytest.raises(ServiceError) as raised:
        engine.submit(make_job("a#1", 10))
    assert raised.value.reason is ErrorReason.STALE_GENERATION
    assert not engine.jobs()
    # Another generation of the same request is another request.
    engine.submit(make_job("a#2", 10))
    assert [job.key for job in engine.jobs()] == ["a#2"]


def test_a_request_that_is_here_is_ended_by_its_cancel():
    engine, events = make_engine(), list[Event]()
    job = make_job("a#1", 10, events)
    engine.submit(job)
    assert engine.cancel("a#1") is job
    assert isinstance(events[-1], FailedEvent)
    assert events[-1].error.reason is ErrorReason.CANCELLED


def test_a_request_that_is_over_is_never_computed_again():
    engine = make_engine()
    job = make_job("a#1", 10)
    engine.submit(job)
    engine.gone(job)
    with pytest.raises(ServiceError, match="a#1 is over") as raised:
        engine.submit(make_job("a#1", 10))
    assert raised.value.reason is ErrorReason.STALE_GENERATION
    late = engine._metrics.registry.get_sample_value("dsv4pd_prefill_late_messages_total", {"what": "request"})
    assert late == 1


def test_what_is_remembered_of_cancels_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_module, "MAX_REMEMBERED", 3)
    engine = make_engine()
    for number in range(5):
        engine.cancel(f"k{number}")
    for number in (2, 3, 4):
        with pytest.raises(ServiceError):
            engine.submit(make_job(f"k{number}", 10))
    engine.submit(make_job("k0", 10))


def test_that_a_write_failed_is_remembered_when_the_request_is_over():
    engine = make_engine()
    job = make_job("a#1", 10)
    engine.submit(job)
    post: Any = Post("a#1", "session", [], 1.0, failed=True)
    use: Any = SpanUse(RecordingSender(), SendRing(256).take(64))  # type: ignore[arg-type]
    job.add_post(post, use, [], None, 10)
    post.done.set_exception(ServiceError(ErrorReason.TRANSFER_FAILED, "a write failed"))
    post.drained.set_result(None)
    assert not engine.writes_failed("a#1")
    engine.gone(job)
    assert engine.writes_failed("a#1")
    assert engine.cancel("a#1") is None
    assert engine.writes_failed("a#1"), "a Cancel that comes late hears of it too"
