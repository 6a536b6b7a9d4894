"""Memory registered in many small pieces: Mooncake refuses a write that crosses the border of two, so none may."""

from pathlib import Path

import pytest

from common.model.model import DeepSeekV4Model
from tests.support.cluster import Cluster
from tests.support.monolithic import generate
from tests.system.test_pair import prompt

pytestmark = pytest.mark.system


def test_a_handover_into_and_out_of_small_pieces(checkpoint: Path, tmp_path: Path, model: DeepSeekV4Model):
    # Two C4 pages a piece in decode's pools, and pieces of the send ring that are smaller than one; pages in order, so
    # that they would merge across borders.
    decode = ("--transfer-register-bytes", "80000", "--shuffle-allocators", "-1")
    prefill = ("--transfer-register-bytes", "20000", "--send-ring-bytes", str(8 << 20))
    cluster = Cluster(checkpoint, tmp_path, prefill, decode).start()
    for length in (1300, 2100):
        answer = cluster.generate(f"pieces-{length}", prompt(length), 8)
        assert answer.tokens == generate(model, prompt(length), 8, chunk_tokens=512, stop_at_eos=False)
    cluster.wait_idle(3)
    assert cluster.stop() == [0, 0]
