"""Two services with different models are never paired."""

import grpc
import pytest

from common.model.small_checkpoint import write_small_checkpoint
from tests.support.cluster import Cluster
from tests.support.processes import Service

pytestmark = pytest.mark.system


def test_another_model_is_refused_with_the_field_and_both_values(checkpoint, tmp_path):
    write_small_checkpoint(tmp_path / "other", seed=9)
    cluster = Cluster(checkpoint, tmp_path).start()
    other = Service(
        "prefill_service",
        tmp_path,
        "--model",
        str(tmp_path / "other"),
        "--send-ring-bytes",
        str(32 << 20),
        name="other",
    ).start()
    mine, cluster.prefill = cluster.prefill, other
    with pytest.raises(grpc.RpcError) as raised:
        cluster.generate("x", [5, 6], max_tokens=2)
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "model_hash" in raised.value.details()
    cluster.prefill = mine
    assert cluster.generate("x", [5, 6], max_tokens=2).tokens
    cluster.wait_idle(2)
    assert other.stop() == 0
    assert cluster.stop() == [0, 0]
