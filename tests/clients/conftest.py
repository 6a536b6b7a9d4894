"""The shipped model behind a prefill, a decode and a router process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

NANO = Path(__file__).resolve().parents[2] / "models" / "dsv4-nano"


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(NANO, tmp_path_factory.mktemp("clients"), with_router=True).start()
    yield made
    made.wait_idle(2)
    assert made.stop() == [0, 0, 0]
