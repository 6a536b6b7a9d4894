"""Triton's decode attention and index scores against their definition: interpreted on the CPU, compiled on a GPU."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from common.kernels.attention import PackedRows, TorchDecodeAttention
from common.kernels.cpu import cpu_kernels
from common.kernels.triton_attention import TritonDecodeAttention
from common.kv.layout import C4_PAGE, C128_PAGE, INDEX_PAGE, WINDOW_PAGE, PageLayout

KERNELS = cpu_kernels()
WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def packed(layout: PageLayout, batch: int, width: int, counts: list[int], generator: torch.Generator) -> PackedRows:
    """Rows of every size in shuffled places; behind the counts places that must not be read."""
    pages = torch.zeros(-(-batch * width // layout.rows) + 1, layout.page_bytes, dtype=torch.uint8)
    order = torch.randperm(pages.shape[0] * layout.rows, generator=generator)[: batch * width]
    sizes = torch.logspace(-3, 1, batch * width)[torch.randperm(batch * width, generator=generator)]
    KERNELS.pack_rows(torch.randn(batch * width, 512, generator=generator) * sizes[:, None], pages, order, layout)
    places = order.view(batch, width).clone()
    places[torch.rand(batch, width, generator=generator) < 0.1] = -1
    return PackedRows(pages, places, torch.tensor(counts), layout)


def moved(rows: PackedRows) -> PackedRows:
    return PackedRows(rows.pages.to(WHERE), rows.places.to(WHERE), rows.counts.to(WHERE), rows.layout)


@pytest.mark.parametrize("far_layout", [None, C4_PAGE, C128_PAGE])
@pytest.mark.parametrize("heads", [4, 20])
def test_attention_over_packed_rows(far_layout: PageLayout | None, heads: int):
    generator = torch.Generator().manual_seed(heads)
    near = packed(WINDOW_PAGE, 3, 128, [128, 0, 128], generator)
    far = None if far_layout is None else packed(far_layout, 3, 70, [70, 0, 33], generator)
    queries, sinks = torch.randn(3, heads, 512, generator=generator) * 0.1, torch.randn(heads, generator=generator)
    expected = TorchDecodeAttention(KERNELS).attend(queries, sinks, near, far)
    found = TritonDecodeAttention().attend(
        queries.to(WHERE), sinks.to(WHERE), moved(near), None if far is None else moved(far)
    )
    error = (found.cpu() - expected).abs().max() / expected.abs().max()
    assert error < 1e-4
    assert expected[1].abs().max() == 0
    assert found[1].abs().max() == 0


@pytest.mark.parametrize("heads", [8, 19])
def test_index_scores_over_packed_keys(heads: int):
    generator = torch.Generator().manual_seed(heads)
    pages = torch.zeros(9, INDEX_PAGE.page_bytes, dtype=torch.uint8)
    sizes = torch.logspace(-3, 1, 9 * 64)[torch.randperm(9 * 64, generator=generator)]
    keys = torch.randn(9 * 64, 128, generator=generator) * sizes[:, None]
    KERNELS.pack_index_keys(keys, pages, torch.randperm(9 * 64, generator=generator))
    table = torch.tensor([[8, 3, 0], [-1, -1, -1], [5, 1, -1]])
    counts = torch.tensor([192, 0, 70])
    queries, weights = torch.randn(3, heads, 128, generator=generator), torch.randn(3, heads, generator=generator)
    expected = TorchDecodeAttention(KERNELS).index_scores(queries, weights, pages, table, counts)
    arguments = (queries, weights, pages, table, counts)
    found = TritonDecodeAttention().index_scores(*(tensor.to(WHERE) for tensor in arguments)).cpu()
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    seen = expected > -torch.inf
    assert (found[seen] - expected[seen]).abs().max() < 1e-4 * expected[seen].abs().max()
