"""The indexer's selection at the sizes of long contexts (32 k to 130 k entries), against a plain sort."""

import pytest
import torch
from torch import Tensor

from common.kernels.attention import top_entries_fixed
from common.model.chunk_selection import ChunkSelection
from common.model.indexer import decode_selection, first_entries
from common.model.selection import top_entries

TOPK = 512
COUNTS = [32_767, 32_768, 65_537, 131_072]


def sorted_top(scores: Tensor, topk: int) -> list[int]:
    """The definition: larger scores first, among equals the lower entry first; ascending."""
    values: list[float] = scores.tolist()
    return sorted(sorted(range(len(values)), key=lambda entry: -values[entry])[:topk])


def hostile_scores(count: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    if kind == "distinct":
        return torch.randn(count, generator=generator)
    if kind == "equal":
        return torch.zeros(count)
    # Scores of a ReLU sum: most are exactly zero, the rest fall on few values.
    return torch.randint(-40, 3, (count,), generator=generator).clamp(min=0).float()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["distinct", "equal", "mostly zero"])
def test_both_selections_are_a_plain_sort(count: int, kind: str):
    scores = hostile_scores(count, kind)
    expected = sorted_top(scores, TOPK)
    assert top_entries(scores[None], TOPK)[0].tolist() == expected
    # In fixed shapes there are columns behind the sequence's own entries.
    padded = torch.cat([scores, torch.full((200,), -torch.inf)])
    assert top_entries_fixed(padded[None], torch.tensor([count]), TOPK)[0].tolist() == expected


@pytest.mark.parametrize("count", COUNTS)
def test_a_decoded_token_reads_the_best_of_a_long_sequence_beside_a_short_one(count: int):
    generator = torch.Generator().manual_seed(count)
    counts = torch.tensor([count, 700, 40])
    keys = [torch.randn(-(-n // 64) * 64, 32, generator=generator) for n in counts.tolist()]
    queries, weights = torch.randn(3, 4, 32, generator=generator), torch.randn(3, 4, generator=generator)
    found = decode_selection(queries, weights, keys, counts, first_entries(counts, TOPK))
    for row, n in enumerate(counts.tolist()):
        if n <= TOPK:
            assert found[row].tolist() == [*range(n), *[-1] * (TOPK - n)]
            continue
        products = torch.relu(queries[row].double() @ keys[row][:n].double().t())
        scores = (products * weights[row].double().unsqueeze(1)).sum(0)
        chosen = found[row]
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        assert int(chosen[-1]) < n
        # In another precision the border may fall on another entry of nearly the same score, and nowhere else.
        border = scores.sort(descending=True).values[TOPK - 1]
        assert (scores[chosen] >= border - 1e-4).all()
        clear = (scores > border + 1e-4).nonzero().flatten()
        assert set(clear.tolist()) <= set(chosen.tolist())


def test_a_chunk_at_the_end_of_a_long_prompt_selects_as_a_plain_sort():
    generator = torch.Generator().manual_seed(4)
    length, tokens = 4 * 65_536, 6
    count = (length + tokens) // 4
    keys = torch.randn(count, 16, generator=generator)
    queries, weights = torch.randn(tokens, 2, 16, generator=generator), torch.randn(tokens, 2, generator=generator)
    selection = ChunkSelection(queries, weights, keys, TOPK, length)
    chosen, unseen = selection.chosen(0, tokens)
    for row in range(tokens):
        visible = (length + row + 1) // 4
        scores = (torch.relu(queries[row] @ keys[:visible].t()) * weights[row].unsqueeze(1)).sum(0)
        assert not unseen[row].any()
        border = scores.sort(descending=True).values[TOPK - 1]
        assert int(chosen[row].max()) < visible
        assert (scores[chosen[row]] >= border - 1e-4).all()
        clear = (scores > border + 1e-4).nonzero().flatten()
        assert set(clear.tolist()) <= set(chosen[row].tolist())
