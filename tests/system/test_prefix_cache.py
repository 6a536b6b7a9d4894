"""A second turn finds the pages of the first on the decode side; its text is that of a run without any cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.model.model import DeepSeekV4Model
from tests.support.cluster import Cluster
from tests.support.monolithic import generate
from tests.system.test_admin import told

pytestmark = pytest.mark.system
OUTPUT = 12
PAGE = 256


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(7000 * seed + length)
    return torch.randint(4, 260, (length,), generator=generator).tolist()


@pytest.fixture(
    scope="module",
    params=[
        "direct prompt",
        pytest.param("staged prompt", marks=pytest.mark.slow),
        pytest.param("direct all", marks=pytest.mark.slow),
    ],
)
def cluster(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    admission, kept = request.param.split()
    pools = ("--host-pages", "48", "--logical-pages", "48", "--hot-entries", "64")
    flags = (*pools, "--admission", admission, "--prefix-cache", kept)
    made = Cluster(checkpoint, tmp_path_factory.mktemp("prefix"), decode_flags=flags).start()
    yield made
    assert made.stop() == [0, 0]


def alone(model: DeepSeekV4Model, token_ids: list[int], output: int = OUTPUT) -> list[int]:
    return generate(model, token_ids, output, chunk_tokens=512, stop_at_eos=False)


@pytest.mark.parametrize("length", [244, 251, 255, 256, 257, 260, 500, 511, 512, 513, 1000])
def test_two_turns_give_the_text_of_a_run_without_a_cache(cluster: Cluster, model: DeepSeekV4Model, length: int):
    """First prompt and output end before, at and behind a border; the second turn repeats both and goes on."""
    before = cluster.decode.status().counters["prefix_hit_pages"]
    first = cluster.generate(f"first {length}", prompt(length), max_tokens=OUTPUT)
    assert first.tokens == alone(model, prompt(length))
    assert first.finished.cached_tokens == 0
    second = [*prompt(length), *first.tokens, *prompt(30, length)]
    answer = cluster.generate(f"second {length}", second, max_tokens=OUTPUT)
    kept = length // PAGE
    if "all" in cluster.decode_flags:
        # Of the output: full pages whose last entry was not the newest when the turn ended.
        kept = max(kept, ((length + OUTPUT - 1) // 4 - 1) // 64)
    assert answer.finished.cached_tokens == kept * PAGE
    assert answer.tokens == alone(model, second)
    # The same prompt once more finds its own pages too.
    again = cluster.generate(f"again {length}", second, max_tokens=OUTPUT)
    assert again.tokens == answer.tokens
    assert again.finished.cached_tokens == len(second) // PAGE * PAGE
    assert cluster.decode.status().counters["prefix_hit_pages"] == before + kept + len(second) // PAGE
    cluster.wait_idle(2)


@pytest.mark.parametrize("common", [255, 256, 257, 300, 511, 512, 513, 700])
def test_prompts_that_part_inside_a_page_share_the_pages_before_it(
    cluster: Cluster, model: DeepSeekV4Model, common: int
):
    head = prompt(common, 3)
    left, right = [*head, *prompt(400, 4)], [*head, *prompt(400, 5)]
    cluster.generate(f"left {common}", left, max_tokens=3)
    answer = cluster.generate(f"right {common}", right, max_tokens=OUTPUT)
    assert answer.finished.cached_tokens == common // PAGE * PAGE
    assert answer.tokens == alone(model, right)


def test_eight_at_once_share_pages_and_each_gives_its_own_text(cluster: Cluster, model: DeepSeekV4Model):
    head = prompt(600, 6)
    cluster.generate("head", head, max_tokens=2)
    prompts = [[*head, *prompt(50 + 31 * index, 7)] for index in range(8)]
    answers = cluster.generate_together(prompts, max_tokens=OUTPUT)
    assert [answer.tokens for answer in answers] == [alone(model, each) for each in prompts]
    assert all(answer.finished.cached_tokens >= 512 for answer in answers)
    cluster.wait_idle(2)


def test_when_the_pool_is_full_of_cached_pages_requests_evict_instead_of_waiting(
    cluster: Cluster, model: DeepSeekV4Model
):
    cluster.generate("small", prompt(700, 8), max_tokens=2)
    status = cluster.decode.status()
    (pool,) = [pool for pool in status.pools if pool.name == "host_c4"]
    assert (pool.used, pool.free + pool.cached) == (0, pool.total)
    assert pool.cached >= 2
    # Three pages each of 48.
    for filler in range(20):
        answer = cluster.generate(f"fill {filler}", prompt(760 + filler, 9), max_tokens=2)
        assert answer.finished.queued_ns < 5e9
    assert cluster.decode.status().counters["prefix_evictions"] > status.counters["prefix_evictions"]
    # What it began with was given up, so it is sent again.
    answer = cluster.generate("small again", prompt(700, 8), max_tokens=OUTPUT)
    assert answer.finished.cached_tokens == 0
    assert answer.tokens == alone(model, prompt(700, 8))
    cluster.wait_idle(2)


def test_flush_cache_frees_what_nobody_uses(cluster: Cluster):
    (pool,) = [pool for pool in cluster.decode.status().pools if pool.name == "host_c4"]
    assert told(cluster.decode, "flush-cache") == {"pages_freed": str(pool.cached)}
    assert all(pool.free == pool.total for pool in cluster.decode.status().pools)
    answer = cluster.generate("after", prompt(700, 8), max_tokens=2)
    assert answer.finished.cached_tokens == 0
