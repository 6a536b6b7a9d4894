"""RDMA as sysfs describes it, over made-up trees: what is chosen, and what is said when nothing fits."""

import resource
from pathlib import Path

import pytest

from common.transfer.engine import EngineSettings, TransferEngine, TransferUnavailableError
from common.transfer.rdma import RdmaError, check_memlock, choose_devices, find_devices

GID = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
UNSET = "0000:0000:0000:0000:0000:0000:0000:0000"


def device(root: Path, name: str, numa: int, state: str = "4: ACTIVE", gids: tuple[str, ...] = (GID,)) -> None:
    port = root / name / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (root / name / "device").mkdir()
    (root / name / "device" / "numa_node").write_text(f"{numa}\n")
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text("Ethernet\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    for index, gid in enumerate(gids):
        (port / "gids" / str(index)).write_text(f"{gid}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    device(tmp_path, "mlx5_0", 0, gids=(GID, UNSET, GID))
    device(tmp_path, "mlx5_1", 1, gids=(GID,))
    device(tmp_path, "mlx5_2", 1, state="1: DOWN")
    return tmp_path


def test_devices_are_read_with_their_ports_and_gids(tree: Path):
    first, second, down = find_devices(tree)
    assert (first.name, first.numa_node, second.numa_node) == ("mlx5_0", 0, 1)
    (port,) = first.ports
    assert (port.number, port.active, port.link_layer, port.rate) == (1, True, "Ethernet", "400 Gb/sec (4X NDR)")
    assert port.gids == ((0, GID), (2, GID))
    assert not down.ports[0].active
    assert find_devices(tree / "nothing") == ()


@pytest.mark.parametrize(
    ("wanted", "numa", "port", "gid", "chosen"),
    [
        ("", -1, 0, -1, "mlx5_0,mlx5_1"),
        ("mlx5_1", -1, 0, -1, "mlx5_1"),
        ("mlx5_0, mlx5_1", 1, 1, -1, "mlx5_1"),
        ("", 0, 0, -1, "mlx5_0"),
        ("", -1, 0, 2, "mlx5_0"),
    ],
)
def test_devices_are_chosen_by_name_node_port_and_gid(
    tree: Path, wanted: str, numa: int, port: int, gid: int, chosen: str
):
    assert choose_devices(wanted, numa, port, gid, find_devices(tree)) == chosen


@pytest.mark.parametrize(
    ("wanted", "numa", "port", "gid", "message"),
    [
        ("mlx5_9", -1, 0, -1, r"'mlx5_9' is not on this host; it has mlx5_0 \(NUMA node 0\), mlx5_1"),
        ("mlx5_2", -1, 0, -1, "no RDMA device fits transfer_device = 'mlx5_2'"),
        ("", 3, 0, -1, "transfer_numa_node = 3"),
        ("", -1, 2, -1, "transfer_ib_port = 2"),
        ("", -1, 0, 1, "transfer_gid_index = 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_there_is(
    tree: Path, wanted: str, numa: int, port: int, gid: int, message: str
):
    with pytest.raises(RdmaError, match=message):
        choose_devices(wanted, numa, port, gid, find_devices(tree))


def test_a_limit_on_locked_memory_names_the_fix():
    check_memlock(100, 100)
    check_memlock(1 << 40, resource.RLIM_INFINITY)
    with pytest.raises(RdmaError, match=r"locks 101 bytes, this process may lock 100: set `ulimit -l unlimited`"):
        check_memlock(101, 100)


@pytest.mark.skipif(bool(find_devices()), reason="this host has RDMA devices")
def test_rdma_without_a_device_is_refused_before_mooncake_takes_tcp_silently():
    with pytest.raises(TransferUnavailableError, match="no RDMA device"):
        TransferEngine(EngineSettings(protocol="rdma"))
