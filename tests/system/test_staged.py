"""Staged admission: pages land on the device, are copied to the host, and the text is that of direct admission."""

from pathlib import Path

import grpc
import pytest

from common.model.model import DeepSeekV4Model
from tests.support.cluster import Cluster
from tests.support.monolithic import generate
from tests.system.test_pair import prompt

pytestmark = pytest.mark.system
LENGTHS = (1, 3, 4, 5, 255, 256, 257, 513, 1000)


def test_text_equals_a_monolithic_run_and_staging_pages_come_back(
    checkpoint: Path, tmp_path: Path, model: DeepSeekV4Model
):
    flags = ("--admission", "staged", "--staging-pages", "8", "--hot-entries", "64", "--resident-pages", "2")
    cluster = Cluster(checkpoint, tmp_path, decode_flags=flags).start()
    answers = cluster.generate_together([prompt(length) for length in LENGTHS], at_once=6, max_tokens=12)
    for length, answer in zip(LENGTHS, answers, strict=True):
        assert answer.tokens == generate(model, prompt(length), 12, chunk_tokens=512, stop_at_eos=False), length
    cluster.wait_idle(2)
    (staging,) = [pool for pool in cluster.decode.status().pools if pool.name == "staging"]
    assert (staging.total, staging.free) == (8, 8)
    assert staging.item_bytes > 0
    # A prompt that never fits the staging pages is refused at once, whatever the host has.
    with pytest.raises(grpc.RpcError) as raised:
        cluster.generate("long", prompt(8 * 256 + 4), max_tokens=1)
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "staging 8" in raised.value.details()
    assert cluster.stop() == [0, 0]
