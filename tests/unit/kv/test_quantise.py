"""The bit-exact contract of rows and index keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.quantise import (
    dequantise_index_keys,
    dequantise_rows,
    hadamard_rotate,
    quantise_index_keys,
    quantise_rows,
    rotate_queries,
    scale_exponents,
)


@pytest.mark.parametrize(
    ("largest", "byte"), [(448.0, 127), (449.0, 128), (1.0, 119), (0.5, 118), (0.0, 105), (1e-5, 105)]
)
def test_golden_scale_bytes(largest: float, byte: int):
    assert scale_exponents(torch.tensor([largest])).item() == byte


def test_golden_row_bytes():
    row = torch.zeros(1, 512)
    row[0, 0], row[0, 1], row[0, 64], row[0, 448] = 1.0, -0.5, 448.0, 1.0
    data, scales = quantise_rows(row)
    # 1 * 2^(127-119) = 256 = e4m3 0x78; -0.5 -> -128 = 0xf0; 448 * 1 = 0x7e; bf16 1.0 = 0x3f80 little endian.
    assert data[0, 0].item() == 0x78
    assert data[0, 1].item() == 0xF0
    assert data[0, 64].item() == 0x7E
    assert data[0, 448:450].tolist() == [0x80, 0x3F]
    assert scales[0].tolist() == [119, 127, 105, 105, 105, 105, 105, 0]


def test_a_row_is_rounded_to_bf16_first():
    row = torch.zeros(1, 512)
    row[0, 0] = 448.9  # bf16: 448
    assert quantise_rows(row)[1][0, 0].item() == 127


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3))
@settings(max_examples=30, deadline=None)
def test_error_is_within_half_a_step_and_a_second_pass_changes_no_value(seed: int, size: float):
    rows = torch.randn(5, 512, generator=torch.Generator().manual_seed(seed)) * size
    values = dequantise_rows(*quantise_rows(rows))
    rounded = rows.to(torch.bfloat16).float()
    blocks = rounded[:, :448].view(5, 7, 64)
    bound = blocks.abs().amax(-1, keepdim=True) / 448 * 2 * 16
    assert ((values[:, :448].view(5, 7, 64) - blocks).abs() <= bound).all()
    assert torch.equal(values[:, 448:], rounded[:, 448:])
    assert torch.equal(dequantise_rows(*quantise_rows(values)), values)


def test_dequantising_agrees_with_torch_for_every_finite_byte_and_scale():
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[~every.view(torch.float8_e4m3fn).float().isnan()]
    data = torch.zeros(len(finite), 576, dtype=torch.uint8)
    data[:, 0] = finite
    for byte in (1, 105, 127, 134, 135, 140):
        scales = torch.full((len(finite), 8), byte, dtype=torch.uint8)
        expected = finite.view(torch.float8_e4m3fn).float() * 2.0 ** (byte - 127)
        assert torch.equal(dequantise_rows(data, scales)[:, 0], expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("column", [0, 447, 511])
def test_values_that_are_not_finite_are_refused(bad: float, column: int):
    rows = torch.zeros(3, 512)
    rows[1, column] = bad
    with pytest.raises(ValueError, match="row 1 of 3 holds NaN or infinity"):
        quantise_rows(rows)
    keys = torch.zeros(2, 128)
    keys[1, 5] = bad
    with pytest.raises(ValueError, match="index key 1 of 2"):
        quantise_index_keys(keys)


def test_values_that_are_infinite_in_bf16_are_refused():
    rows = torch.zeros(2, 512)
    rows[1, 3] = 3.4e38
    with pytest.raises(ValueError, match="row 1 of 2 holds NaN or infinity"):
        quantise_rows(rows)
    rows[1, 3] = 3e38
    assert dequantise_rows(*quantise_rows(rows))[1, 3].isfinite()


def test_wrong_widths_are_refused():
    with pytest.raises(ValueError, match=r"must be \[n, 512\], got \[2, 511\]"):
        quantise_rows(torch.zeros(2, 511))
    with pytest.raises(ValueError, match=r"must be \[n, 128\]"):
        quantise_index_keys(torch.zeros(128))


def test_no_rows_at_all():
    assert dequantise_rows(*quantise_rows(torch.zeros(0, 512))).shape == (0, 512)
    assert dequantise_index_keys(*quantise_index_keys(torch.zeros(0, 128))).shape == (0, 128)


def test_the_rotation_is_orthonormal_and_symmetric():
    matrix = hadamard_rotate(torch.eye(128))
    assert torch.allclose(matrix @ matrix, torch.eye(128), atol=1e-6)
    assert torch.equal(matrix, matrix.T)


def test_rotated_queries_and_keys_keep_their_products():
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(7, 128, generator=generator), torch.randn(3, 5, 128, generator=generator)
    rotated = dequantise_index_keys(*quantise_index_keys(keys))
    exact = queries @ keys.T
    assert (rotate_queries(queries) @ rotated.T - exact).abs().max() < 0.06 * exact.abs().max()
    assert torch.allclose(rotate_queries(queries), hadamard_rotate(queries), atol=1e-5)


def test_a_rotated_query_does_not_depend_on_how_many_there_are():
    queries = torch.randn(9, 16, 128, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rotate_queries(queries)[:1], rotate_queries(queries[:1]))
