"""First come, first served, with bounded overtaking."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_service.waiting import WaitingQueue


class Job:
    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.overtaken = 0


def serve(queue: WaitingQueue[Job], room: int) -> tuple[list[int], int]:
    """Numbers of the jobs served in one pass with `room` to give away, and the overtakes counted."""
    served: list[int] = []

    def give(job: Job) -> bool:
        nonlocal room
        if job.size > room:
            return False
        room -= job.size
        served.append(job.number)
        return True

    return served, queue.serve(give)


def queue_of(sizes: list[int], max_overtakes: int) -> WaitingQueue[Job]:
    queue: WaitingQueue[Job] = WaitingQueue(max_overtakes)
    for number, size in enumerate(sizes):
        queue.append(Job(number, size))
    return queue


def test_what_fits_is_served_in_order_of_arrival():
    queue = queue_of([1, 2, 3], 0)
    assert serve(queue, 3) == ([0, 1], 0)
    assert [job.number for job in queue] == [2]


def test_with_no_overtakes_the_first_holds_everybody():
    assert serve(queue_of([9, 1, 1], 0), 5) == ([], 0)


def test_short_ones_pass_until_the_limit_and_then_wait_for_the_first():
    queue = queue_of([9, 1, 1, 1], 2)
    assert serve(queue, 5) == ([1, 2], 2)
    assert serve(queue, 5) == ([], 0)
    assert serve(queue, 9) == ([0], 0)
    assert serve(queue, 9) == ([3], 0)


def test_one_that_leaves_holds_nobody():
    queue = queue_of([9, 1], 0)
    first = next(iter(queue))
    assert queue.remove(first)
    assert not queue.remove(first)
    assert serve(queue, 1) == ([1], 0)


def test_what_serving_raises_loses_nobody_else():
    queue = queue_of([9, 1, 1], 5)

    def give(job: Job) -> bool:
        if job.number == 1:
            raise RuntimeError("no more")
        return False

    with pytest.raises(RuntimeError, match="no more"):
        queue.serve(give)
    assert [job.number for job in queue] == [0, 2]


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="max_overtakes = -1"):
        WaitingQueue[Job](-1)


@settings(max_examples=300)
@given(
    limit=st.integers(0, 5),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("arrives"), st.integers(1, 9)),
            st.tuples(st.just("leaves"), st.integers(0, 20)),
            st.tuples(st.just("room"), st.integers(0, 12)),
        ),
        max_size=60,
    ),
)
def test_nobody_is_overtaken_more_often_than_the_limit_and_equals_keep_their_order(
    limit: int, events: list[tuple[str, int]]
):
    queue: WaitingQueue[Job] = WaitingQueue(limit)
    waiting: list[Job] = []
    for number, (kind, value) in enumerate(events):
        if kind == "arrives":
            waiting.append(Job(number, value))
            queue.append(waiting[-1])
        elif kind == "leaves" and waiting:
            gone = waiting.pop(value % len(waiting))
            assert queue.remove(gone)
        elif kind == "room":
            served, overtakes = serve(queue, value)
            assert served == sorted(served)
            counted = 0
            for job in [job for job in waiting if job.number in served]:
                earlier = [other for other in waiting if other.number < job.number and other.number not in served]
                assert all(other.size != job.size for other in earlier)
                for other in earlier:
                    other.overtaken += 1
                counted += bool(earlier)
            assert overtakes == counted
            waiting = [job for job in waiting if job.number not in served]
        assert all(job.overtaken <= limit for job in waiting)
        assert [job.number for job in queue] == [job.number for job in waiting]
