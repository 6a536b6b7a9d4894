"""Byte runs and the send ring."""

import itertools
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.transfer.plan import Run, batches, cut, merge
from common.transfer.send_ring import SendRing


def bytes_of(runs: list[Run]) -> list[tuple[int, int]]:
    return [(run.source + i, run.target + i) for run in runs for i in range(run.size)]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(100, 130), st.integers(1, 9)), max_size=12), st.integers(1, 12)
)
def test_merged_runs_move_the_same_bytes_in_the_same_order(pieces: list[tuple[int, int, int]], most: int):
    runs = [Run(*piece) for piece in pieces]
    merged = merge(runs, most)
    assert bytes_of(merged) == bytes_of(runs)
    assert all(run.size <= most for run in merged)


def test_pages_adjacent_on_both_sides_become_one_run():
    runs = [Run(i * 100, 5000 + i * 100, 100) for i in range(10)]
    assert merge(runs, 1000) == [Run(0, 5000, 1000)]
    assert len(merge(runs, 300)) == 4
    scattered = [Run(i * 100, 5000 - i * 100, 100) for i in range(10)]
    assert merge(scattered, 1000) == scattered


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 5), st.integers(1, 80))
def test_batches_are_bounded_in_runs_and_bytes_and_lose_nothing(sizes: list[int], most: int, most_bytes: int):
    runs = [Run(i, i, size) for i, size in enumerate(sizes)]
    made = list(batches(runs, most, most_bytes))
    assert [run for batch in made for run in batch] == runs
    for batch in made:
        assert len(batch) <= most
        assert len(batch) == 1 or sum(run.size for run in batch) <= most_bytes


@given(st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_living_spans_never_overlap_and_everything_comes_back(seed: int):
    rng = random.Random(seed)
    ring = SendRing(4096)
    living = []
    for _ in range(120):
        if living and rng.random() < 0.5:
            ring.release(living.pop(rng.randrange(len(living))))
        else:
            span = ring.take(rng.randint(1, 1500))
            if span is not None:
                living.append(span)
                span.data.fill_(rng.randint(1, 255))
        ranges = sorted((span.offset, span.offset + span.size) for span in living)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
        assert all(end <= 4096 for _, end in ranges)
    for span in living:
        ring.release(span)
    assert ring.used == 0
    assert ring.take(4096) is not None


def test_a_span_comes_zeroed_and_goes_back_once():
    ring = SendRing(256)
    span = ring.take(100)
    assert span is not None
    span.data.fill_(7)
    ring.release(span)
    again = ring.take(100)
    assert again is not None
    assert again.data.sum() == 0
    with pytest.raises(ValueError, match="released twice"):
        ring.release(span)


def test_a_full_ring_says_so_and_waits_no_longer_than_told():
    ring = SendRing(256)
    span = ring.take(200)
    assert ring.take(100) is None
    threading.Timer(0.05, lambda: ring.release(span)).start()
    assert ring.take(100, timeout_s=5) is not None
    with pytest.raises(ValueError, match="does not fit a send ring of 256"):
        ring.take(257)


def test_runs_of_two_pieces_of_the_receivers_memory_do_not_merge():
    runs = [Run(i * 100, 5000 + i * 100, 100, 5200 if i < 2 else 5400) for i in range(4)]
    assert merge(runs, 1000) == [Run(0, 5000, 200, 5200), Run(200, 5200, 200, 5400)]


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), max_size=8))
def test_runs_are_cut_at_the_senders_own_borders_and_lose_nothing(piece: int, places: list[tuple[int, int]]):
    runs = [Run(source, 1000 + source, size) for source, size in places]

    def sizes(address: int, size: int) -> list[int]:
        borders = [b for b in range(0, 400, piece) if address < b < address + size]
        ends = [address, *borders, address + size]
        return [b - a for a, b in itertools.pairwise(ends)]

    made = cut(runs, sizes)
    assert bytes_of(made) == bytes_of(runs)
    assert all(run.source // piece == (run.source + run.size - 1) // piece for run in made)
