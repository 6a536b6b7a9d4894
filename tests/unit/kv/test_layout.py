"""Row and page arithmetic against the published numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv import layout
from common.kv.handover import Handover, page_runs, ring_runs
from tests.support.lengths import SWEEP


def test_page_sizes_and_scale_offsets_are_the_published_ones():
    assert (layout.C4_PAGE.page_bytes, layout.C4_PAGE.scale_offset) == (37440, 36864)
    assert (layout.C128_PAGE.page_bytes, layout.C128_PAGE.scale_offset) == (1728, 1152)
    assert (layout.WINDOW_PAGE.page_bytes, layout.WINDOW_PAGE.scale_offset) == (149760, 147456)
    assert (layout.INDEX_PAGE.page_bytes, layout.INDEX_PAGE.scale_offset) == (8448, 8192)


def test_a_row_is_two_pieces():
    assert layout.C4_PAGE.pieces(1, 2) == ((576, 1152), (36864 + 8, 16))
    assert layout.C4_PAGE.pieces(63, 1) == ((63 * 576, 576), (36864 + 63 * 8, 8))


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (63, 2), (64, 1)])
def test_rows_outside_a_page_are_refused(first: int, count: int):
    with pytest.raises(ValueError, match="not inside a page of 64"):
        layout.C4_PAGE.pieces(first, count)


def test_pieces_of_all_rows_cover_the_page_once():
    for page in (layout.C4_PAGE, layout.C128_PAGE, layout.WINDOW_PAGE, layout.INDEX_PAGE):
        seen: list[int] = []
        for row in range(page.rows):
            for offset, size in page.pieces(row, 1):
                seen.extend(range(offset, offset + size))
        assert len(seen) == len(set(seen)) == page.rows * (page.data_bytes + page.scale_bytes)
        assert max(seen) < page.page_bytes


def test_one_million_tokens_need_4096_host_pages():
    assert layout.host_page_count(1 << 20) == 4096
    assert layout.host_page_count(1 << 20) * layout.C4_PAGE.page_bytes == 153_354_240


def test_the_last_logical_page_has_no_entry_where_length_mod_256_is_1_to_3():
    for tokens in (257, 258, 259, 513):
        assert layout.logical_page_count(tokens) == layout.host_page_count(tokens) + 1
    assert layout.logical_page_count(260) == layout.host_page_count(260)


@pytest.mark.parametrize("tokens", SWEEP)
def test_a_handover_counts_every_row_once(tokens: int):
    handover = Handover(tokens)
    assert sum(handover.c4_rows(page) for page in range(handover.host_pages)) == tokens // 4
    assert sum(handover.c128_rows(page) for page in range(handover.c128_pages)) == tokens // 128
    positions = [run.position + i for run in handover.window_runs() for i in range(run.count)]
    assert positions == list(range(max(0, tokens - 128), tokens))
    live4 = [run.position + i for run in handover.state_runs(4) for i in range(run.count)]
    assert live4 == list(range(max(0, tokens // 4 * 4 - 4), tokens))
    assert sum(run.count for run in handover.state_runs(128)) == tokens % 128


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_fewer_than_four_tokens_carry_no_c4_page_but_window_and_state(tokens: int):
    handover = Handover(tokens)
    assert handover.host_pages == 0
    assert handover.logical_pages == 1
    assert sum(run.count for run in handover.window_runs()) == tokens
    assert sum(run.count for run in handover.state_runs(4)) == tokens


def test_list_lengths_that_do_not_fit_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"host_c4_pages holds 3 pages, a prompt of 512 tokens needs 2"):
        Handover(512).check_lists(3, 2)
    with pytest.raises(ValueError, match=r"logical_pages holds 1 pages, a prompt of 512 tokens needs 2"):
        Handover(512).check_lists(2, 1)
    Handover(512).check_lists(2, 2)


@given(st.integers(0, 2000), st.integers(0, 128), st.sampled_from([8, 128, 256]))
def test_ring_runs_are_contiguous_and_complete(first: int, count: int, size: int):
    count = min(count, size)
    runs = ring_runs(first, first + count, size)
    assert len(runs) <= 2
    rows = [(run.row + i, run.position + i) for run in runs for i in range(run.count)]
    assert [position for _, position in rows] == list(range(first, first + count))
    assert all(row == position % size for row, position in rows)


@given(st.lists(st.integers(0, 40), unique=True))
def test_page_runs_split_a_list_where_pages_do_not_follow_one_another(pages: list[int]):
    runs = list(page_runs(pages))
    assert [place for first, count in runs for place in range(first, first + count)] == list(range(len(pages)))
    for first, count in runs:
        assert pages[first : first + count] == list(range(pages[first], pages[first] + count))
