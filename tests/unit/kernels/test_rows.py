"""Packing, unpacking and copying rows: bytes in their places, nothing beside them touched."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kernels.cpu import cpu_kernels
from common.kv.layout import C4_PAGE, C128_PAGE, INDEX_PAGE, WINDOW_PAGE, PageLayout
from common.kv.quantise import dequantise_index_keys, dequantise_rows, quantise_index_keys, quantise_rows

KERNELS = cpu_kernels()
LAYOUTS = (C4_PAGE, C128_PAGE, WINDOW_PAGE)


def row_bytes(pages: torch.Tensor, place: int, layout: PageLayout) -> bytes:
    """By plain offset arithmetic, not through the kernels' views."""
    page, row = divmod(place, layout.rows)
    flat = pages.flatten()
    base = page * layout.page_bytes
    data = flat[base + row * layout.data_bytes : base + (row + 1) * layout.data_bytes]
    scale = base + layout.rows * layout.data_bytes + row * layout.scale_bytes
    return bytes(data.tolist()) + bytes(flat[scale : scale + layout.scale_bytes].tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_lie_where_the_layout_says_and_touch_nothing_else(layout: PageLayout):
    generator = torch.Generator().manual_seed(1)
    pages = torch.randint(0, 256, (3, layout.page_bytes), dtype=torch.uint8, generator=generator)
    before = pages.clone()
    places = torch.tensor([0, layout.rows - 1, layout.rows, 3 * layout.rows - 1])
    rows = torch.randn(4, 512, generator=generator)
    KERNELS.pack_rows(rows, pages, places, layout)
    data, scales = quantise_rows(rows)
    touched = torch.zeros_like(pages, dtype=torch.bool)
    for index, place in enumerate(places.tolist()):
        assert row_bytes(pages, place, layout) == bytes(data[index].tolist()) + bytes(scales[index].tolist())
        for offset, size in layout.pieces(place % layout.rows, 1):
            touched[place // layout.rows, offset : offset + size] = True
    assert torch.equal(pages[~touched], before[~touched])
    assert torch.equal(KERNELS.unpack_rows(pages, places, layout), dequantise_rows(data, scales))


def test_absent_rows_unpack_to_zero():
    pages = torch.randint(1, 100, (1, C4_PAGE.page_bytes), dtype=torch.uint8)
    found = KERNELS.unpack_rows(pages, torch.tensor([3, -1, 5]), C4_PAGE)
    assert found[1].abs().max() == 0
    assert found[0].abs().max() > 0


def test_index_keys_keep_data_and_scales_apart():
    pages = torch.zeros(2, INDEX_PAGE.page_bytes, dtype=torch.uint8)
    keys = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    KERNELS.pack_index_keys(keys, pages, torch.tensor([63, 64, 100]))
    data, scales = quantise_index_keys(keys)
    for index, place in enumerate((63, 64, 100)):
        assert row_bytes(pages, place, INDEX_PAGE)[:128] == bytes(data[index].tolist())
    unpacked = KERNELS.unpack_index_pages(pages, torch.tensor([1, 0]))
    assert torch.equal(unpacked[[127, 0, 36]], dequantise_index_keys(data, scales))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_transferred_rows_are_the_same_bytes_for_any_layouts_and_places(data: st.DataObject):
    source_layout, target_layout = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(LAYOUTS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    source = torch.randint(0, 256, (3, source_layout.page_bytes), dtype=torch.uint8, generator=generator)
    target = torch.randint(0, 256, (4, target_layout.page_bytes), dtype=torch.uint8, generator=generator)
    most = min(3 * source_layout.rows, 4 * target_layout.rows)
    count = data.draw(st.integers(0, min(most, 40)))
    from_places = torch.randperm(3 * source_layout.rows, generator=generator)[:count]
    to_places = torch.randperm(4 * target_layout.rows, generator=generator)[:count]
    before = target.clone()
    KERNELS.transfer_rows(source, from_places, target, to_places, source_layout, target_layout)
    moved = dict(zip(to_places.tolist(), from_places.tolist(), strict=True))
    for place in range(4 * target_layout.rows):
        expected = (
            row_bytes(source, moved[place], source_layout)
            if place in moved
            else row_bytes(before, place, target_layout)
        )
        if place in moved or place % 17 == 0:
            assert row_bytes(target, place, target_layout) == expected


def test_whole_aligned_pages_go_as_pages_and_a_batch_of_64_rows_does_not():
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(0, 256, (4, C4_PAGE.page_bytes), dtype=torch.uint8, generator=generator)
    target = torch.zeros(4, C4_PAGE.page_bytes, dtype=torch.uint8)
    inside = torch.arange(64)
    KERNELS.transfer_rows(source, 64 * 2 + inside, target, 64 * 3 + inside, C4_PAGE, C4_PAGE)
    assert torch.equal(target[3], source[2])
    # 64 rows of 64 different requests: rows, not a page.
    target.zero_()
    scattered = torch.arange(64) * 4 % 256
    KERNELS.transfer_rows(source, scattered, target, 64 + inside, C4_PAGE, C4_PAGE)
    for row in range(64):
        assert row_bytes(target, 64 + row, C4_PAGE) == row_bytes(source, int(scattered[row]), C4_PAGE)
    assert target[0].abs().sum() == 0
    # Unaligned by one row on either side.
    target.zero_()
    KERNELS.transfer_rows(source, 1 + inside, target, inside, C4_PAGE, C4_PAGE)
    assert row_bytes(target, 63, C4_PAGE) == row_bytes(source, 64, C4_PAGE)


@pytest.mark.parametrize("bad", [-2, 128, 2**40])
def test_hostile_indices_are_refused_before_a_byte_moves(bad: int):
    pages = torch.zeros(2, C4_PAGE.page_bytes, dtype=torch.uint8)
    good, hostile = torch.tensor([0, 1]), torch.tensor([0, bad])
    with pytest.raises(ValueError, match=rf"pack_rows: row {bad} is not in \[-1, 128\)"):
        KERNELS.pack_rows(torch.ones(2, 512), pages, hostile, C4_PAGE)
    with pytest.raises(ValueError, match=rf"target: row {bad} is not in"):
        KERNELS.transfer_rows(pages, good, pages, hostile, C4_PAGE, C4_PAGE)
    with pytest.raises(ValueError, match=rf"source: row {bad} is not in"):
        KERNELS.transfer_rows(pages, hostile, pages, good, C4_PAGE, C4_PAGE)
    assert pages.sum() == 0


def test_lists_of_unequal_length_and_pages_of_another_layout_are_refused():
    pages = torch.zeros(2, C4_PAGE.page_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="2 source places but 1 target places"):
        KERNELS.transfer_rows(pages, torch.tensor([0, 1]), pages, torch.tensor([0]), C4_PAGE, C4_PAGE)
    with pytest.raises(ValueError, match="pages must be"):
        KERNELS.unpack_rows(pages, torch.tensor([0]), C128_PAGE)
    with pytest.raises(ValueError, match="places must be"):
        KERNELS.unpack_rows(pages, torch.tensor([0], dtype=torch.int32), C4_PAGE)
