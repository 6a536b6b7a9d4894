"""First come, first served, in chunks that begin where they always begin."""

from concurrent.futures import Future
from typing import Any

from common.errors import ErrorReason, ServiceError
from common.sampling import SampledToken, SamplingSettings, SamplingState
from common.transfer.send_ring import SendRing
from common.transfer.sender import Post, Receipt
from prefill_service.job import DoneEvent, Event, FailedEvent, PrefillJob, SpanUse, StartedEvent
from prefill_service.scheduler import Scheduler


def make_job(key: str, tokens: int, events: list[Event] | None = None, gone: list[str] | None = None) -> PrefillJob:
    ids = [5] * tokens
    ticket: Any = None
    state = SamplingState(SamplingSettings(), ids, (1,))
    seen = events if events is not None else []
    return PrefillJob(
        key, key, ids, state, ticket, 1.0, seen.append, lambda job: gone.append(job.key) if gone is not None else None
    )


def test_chunks_begin_at_multiples_of_the_chunk_size_whatever_else_runs():
    scheduler = Scheduler((0,), 256, 600, 10_000)
    jobs = [make_job("a", 700), make_job("b", 100), make_job("c", 300)]
    for job in jobs:
        scheduler.add(job)
    scheduler.admit()
    seen: dict[str, list[tuple[int, int]]] = {}
    while scheduler.running:
        chunks = scheduler.next_chunks()
        assert sum(c.plan.end - c.plan.start for c in chunks) <= 600
        for chunk in chunks:
            seen.setdefault(chunk.job.key, []).append((chunk.plan.start, chunk.plan.end))
            chunk.job.computed = chunk.plan.end
            if chunk.plan.is_last:
                scheduler.remove(chunk.job)
    assert seen == {"a": [(0, 256), (256, 512), (512, 700)], "b": [(0, 100)], "c": [(0, 256), (256, 300)]}


def test_a_chunk_larger_than_the_step_still_goes():
    scheduler = Scheduler((0,), 512, 100, 10_000)
    scheduler.add(make_job("a", 512))
    scheduler.admit()
    assert len(scheduler.next_chunks()) == 1


def test_a_prompt_that_does_not_fit_yet_is_not_overtaken():
    scheduler = Scheduler((0,), 256, 1024, 1000)
    first, big, small = make_job("first", 600), make_job("big", 900), make_job("small", 10)
    for job in (first, big, small):
        scheduler.add(job)
    assert scheduler.admit() == [first]
    assert scheduler.admit() == []
    scheduler.remove(first)
    assert scheduler.admit() == [big, small] if 910 <= 1000 else [big]


def test_ended_jobs_leave_wherever_they_are():
    scheduler = Scheduler((0,), 256, 1024, 100)
    running, waiting = make_job("r", 90), make_job("w", 90)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.admit()
    running.cancel()
    waiting.cancel()
    assert scheduler.drop_ended() == [waiting, running]
    assert (scheduler.waiting, scheduler.running) == (0, 0)


def post_of(job: PrefillJob) -> Post:
    return Post(job.key, "s", [], 1.0)


def test_a_job_is_done_when_all_is_landed_and_gone_when_all_is_drained():
    events: list[Event] = []
    gone: list[str] = []
    job = make_job("a", 4, events, gone)
    ring = SendRing(1024)
    span = ring.take(100)
    assert span is not None
    use = SpanUse(ring, span)
    job.start()
    post = post_of(job)
    job.add_post(post, use, [], None, 4)
    use.release()
    job.computed_last(SampledToken(7, 0.0))
    job.release()
    assert [type(event) for event in events] == [StartedEvent]
    post.done.set_result(Receipt(10, 1, 2))
    assert isinstance(events[-1], DoneEvent)
    assert events[-1].first_token.token_id == 7
    assert not gone
    assert ring.used > 0
    post.drained.set_result(None)
    assert gone == ["a"]
    assert ring.used == 0
    assert job.gone.done()


def test_a_failed_post_fails_the_job_once_and_its_span_waits_for_the_drain():
    events: list[Event] = []
    gone: list[str] = []
    job = make_job("a", 4, events, gone)
    ring = SendRing(1024)
    span = ring.take(100)
    assert span is not None
    use = SpanUse(ring, span)
    job.start()
    post = post_of(job)
    job.add_post(post, use, [], (0, 1), 4)
    use.release()
    post.done.set_exception(ServiceError(ErrorReason.TRANSFER_FAILED, "no"))
    assert isinstance(events[-1], FailedEvent)
    assert not job.cancel()
    job.computed_last(SampledToken(7, 0.0))
    assert not isinstance(events[-1], DoneEvent)
    job.release()
    assert not gone
    assert ring.used > 0
    post.drained.set_result(None)
    assert gone == ["a"]
    assert ring.used == 0


def test_futures_of_a_post_are_its_own():
    one, other = Post("a", "s", [], 1.0), Post("a", "s", [], 1.0)
    assert isinstance(one.done, Future)
    assert one.done is not other.done


def test_identical_prompts_are_one_computation_until_a_page_was_sent():
    scheduler = Scheduler((0,), 256, 600, 10_000)
    first, same, other = make_job("first", 300), make_job("same", 300), make_job("other", 299)
    scheduler.add(first)
    assert scheduler.join(same) is first
    assert scheduler.join(other) is None
    scheduler.add(other)
    assert scheduler.admit() == [first, other]
    assert [c.job for c in scheduler.next_chunks()] == [first, other]
    first.computed = 256
    assert scheduler.join(make_job("late", 300)) is None


def test_where_the_computed_one_ends_the_next_goes_on_from_there():
    scheduler = Scheduler((0,), 256, 600, 10_000)
    first, second, third = make_job("first", 300), make_job("second", 300), make_job("third", 300)
    kv: Any = object()
    scheduler.add(first)
    scheduler.admit()
    for job in (second, third):
        assert scheduler.join(job) is first
    first.kv, first.computed = kv, 256
    first.cancel()
    assert scheduler.drop_ended() == [first]
    assert [(c.job, c.plan.start) for c in scheduler.next_chunks()] == [(second, 256)]
    assert (second.kv, second.sharers, first.kv, first.sharers) == (kv, [third], None, [])
    third.cancel()
    assert scheduler.drop_ended() == [third]
    second.cancel()
    assert scheduler.drop_ended() == [second]
    assert scheduler.running == 0
