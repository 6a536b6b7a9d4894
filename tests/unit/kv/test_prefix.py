"""Names of prefixes: equal exactly where all tokens up to there, model and tokenizer are."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv.prefix import LINK_BYTES, chain_seed, extend_chain, first_links, link, link_count, pages_on_host

SEED = chain_seed("model", "tokenizer")


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(129_280), k=length)


@pytest.mark.parametrize(("tokens", "links"), [(0, 0), (255, 0), (256, 1), (257, 1), (511, 1), (512, 2), (1000, 3)])
def test_one_link_for_each_full_page(tokens: int, links: int):
    chain = extend_chain(SEED, b"", text(tokens))
    assert link_count(chain) == links
    assert [len(link(chain, page)) for page in range(links)] == [LINK_BYTES] * links


@given(at=st.integers(0, 1023), length=st.integers(0, 1024))
def test_a_changed_token_changes_its_page_and_all_behind_it_and_none_before(at: int, length: int):
    before = text(1024)
    after = [*before[:at], before[at] ^ 1, *before[at + 1 :]]
    left, right = extend_chain(SEED, b"", before), extend_chain(SEED, b"", after)
    same = [link(left, page) == link(right, page) for page in range(4)]
    assert same == [page < at // 256 for page in range(4)]
    # A chain is made of the same links, however it was extended.
    assert extend_chain(SEED, extend_chain(SEED, b"", before[:length]), before) == left


def test_the_same_block_at_another_place_has_another_name():
    block = text(256)
    chain = extend_chain(SEED, b"", [*block, *block])
    assert link(chain, 0) != link(chain, 1)
    assert first_links(chain, 1) == extend_chain(SEED, b"", block)


def test_other_weights_or_another_tokenizer_name_everything_anew():
    names = {
        extend_chain(chain_seed(m, t), b"", text(256)) for m, t in [("a", "b"), ("a", "c"), ("c", "b"), ("ab", "")]
    }
    assert len(names) == 4


@pytest.mark.parametrize(
    ("prompt", "seen", "pages"),
    [
        (255, 255, 0),
        (256, 256, 1),  # landed whole
        (257, 300, 1),
        (250, 256, 0),  # entry 63 is the newest: not on the host yet
        (250, 259, 0),
        (250, 260, 1),  # entry 64 is born, entry 63 backed up
        (512, 515, 2),
        (600, 768, 2),
        (600, 772, 3),
        (1, 1, 0),
        (0, 0, 0),
    ],
)
def test_a_page_counts_once_its_last_entry_is_on_the_host(prompt: int, seen: int, pages: int):
    assert pages_on_host(prompt, seen) == pages
