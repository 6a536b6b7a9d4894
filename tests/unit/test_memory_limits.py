"""Limits of control groups, read from made-up trees of both versions."""

from pathlib import Path

import pytest

from common.memory_limits import (
    MemoryLimit,
    MemoryLimitError,
    available_memory,
    cgroup_limits,
    check_memory,
    tightest,
)

GIB = 1 << 30


class Host:
    """A tree of /sys/fs/cgroup and /proc."""

    def __init__(self, folder: Path, groups: str) -> None:
        self.root, self.proc = folder / "cgroup", folder / "proc"
        self.root.mkdir()
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text(groups)

    def group(self, path: str, **files: str) -> None:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text + "\n")

    def limits(self) -> tuple[MemoryLimit, ...]:
        return cgroup_limits(self.root, self.proc)


def test_version_2_limits_hold_up_the_hierarchy_and_cache_is_not_in_use(tmp_path: Path):
    host = Host(tmp_path, "0::/pods/one/main\n")
    host.group("pods", memory__max=str(8 * GIB), memory__current=str(6 * GIB), memory__stat="anon 5\nfile 9")
    host.group("pods/one", memory__max="max", memory__current=str(3 * GIB))
    host.group(
        "pods/one/main", memory__max=str(4 * GIB), memory__current=str(3 * GIB),
        memory__stat=f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}",
    )  # fmt: skip
    inner, outer = host.limits()
    assert inner == MemoryLimit(str(host.root / "pods/one/main/memory.max"), 4 * GIB, 3 * GIB // 2)
    assert outer == MemoryLimit(str(host.root / "pods/memory.max"), 8 * GIB, 6 * GIB)
    assert tightest(host.limits()) == outer


def test_a_container_that_sees_its_own_group_at_the_root(tmp_path: Path):
    for number, path in enumerate(("/", "/docker/0123abcd", "/../../elsewhere")):
        folder = tmp_path / str(number)
        folder.mkdir()
        host = Host(folder, f"0::{path}\n")
        host.group("", memory__max=str(GIB), memory__current="1000")
        assert host.limits() == (MemoryLimit(str(host.root / "memory.max"), GIB, 1000),), path


def test_version_1(tmp_path: Path):
    host = Host(tmp_path, "5:cpu,cpuacct:/a\n4:memory:/a/b\n1:name=systemd:/\n0::/\n")
    host.group("memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes=str(7 * GIB))
    host.group(
        "memory/a/b", memory__limit_in_bytes=str(2 * GIB), memory__usage_in_bytes=str(GIB),
        memory__stat="inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 200",
    )  # fmt: skip
    assert host.limits() == (MemoryLimit(str(host.root / "memory/a/b/memory.limit_in_bytes"), 2 * GIB, GIB - 500),)


def test_version_2_beside_version_1(tmp_path: Path):
    host = Host(tmp_path, "4:cpu:/\n0::/user\n")
    host.group("unified/user", memory__max=str(GIB), memory__current="0")
    assert [limit.total for limit in host.limits()] == [GIB]


@pytest.mark.parametrize("groups", ["", "0::/\n", "4:memory:/gone\n"])
def test_no_limit_where_there_is_none(tmp_path: Path, groups: str):
    assert Host(tmp_path, groups).limits() == ()


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path):
    host = Host(tmp_path, "0::/\n")
    host.group("", memory__max="1000", memory__current="1200")
    (limit,) = host.limits()
    assert limit.left == 0


def test_memory_of_the_machine(tmp_path: Path):
    (tmp_path / "meminfo").write_text(
        "MemTotal:   1000 kB\nMemFree:  10 kB\nMemAvailable:    600 kB\nHugePages_Total: 0\n"
    )
    found = available_memory(tmp_path)
    assert (found.total, found.used, found.left) == (1000 << 10, 400 << 10, 600 << 10)
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\n")
    with pytest.raises(ValueError, match="MemAvailable"):
        available_memory(tmp_path)
    assert 0 < available_memory().left <= available_memory().total


def test_the_error_names_the_limit_its_value_and_the_bytes_needed():
    limits = (MemoryLimit("/sys/fs/cgroup/a/memory.max", 3 * GIB, GIB), MemoryLimit("/b", 9 * GIB, 0))
    check_memory(2 * GIB, "the host pool", limits)
    with pytest.raises(MemoryLimitError) as raised:
        check_memory(2 * GIB + 1, "the host pool", limits)
    message = str(raised.value)
    for part in (
        "the host pool needs 2147483649 bytes",
        "/sys/fs/cgroup/a/memory.max is 3221225472",
        "leaves 2147483648",
    ):
        assert part in message
