"""How much more memory of the host this process may take: what the kernel calls available, and the limits of the
control groups that it is in (version 2 and version 1), each with a name that an operator finds again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.quantities import show_bytes

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
# Version 1 says "no limit" with the greatest number of whole pages.
_NO_LIMIT = 1 << 60


class MemoryLimitError(RuntimeError):
    """More memory is asked for than a limit leaves; the message names the limit, its value and the bytes needed."""


@dataclass(frozen=True)
class MemoryLimit:
    """`total` bytes of which `used` are taken; page cache that the kernel would give back does not count as used."""

    name: str
    total: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.total - self.used)


def available_memory(proc: Path = PROC) -> MemoryLimit:
    """The machine's memory, MemTotal and MemAvailable. Raises ValueError where the kernel does not say them."""
    kib = _numbers(proc / "meminfo")
    if "MemTotal" not in kib or "MemAvailable" not in kib:
        raise ValueError(f"{proc / 'meminfo'} names no MemTotal and MemAvailable")
    total = kib["MemTotal"] * 1024
    return MemoryLimit("memory of this machine (MemAvailable)", total, total - kib["MemAvailable"] * 1024)


def cgroup_limits(root: Path = CGROUPS, proc: Path = PROC) -> tuple[MemoryLimit, ...]:
    """Of this process's control groups and all above them, the innermost first; none where nothing is limited."""
    found: list[MemoryLimit] = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            # A hybrid system mounts version 2 one level down.
            for base in (root, root / "unified"):
                found += [_version2(folder) for folder in _upwards(base, path) if _limit(folder / "memory.max")]
        elif "memory" in controllers.split(","):
            found += [
                _version1(folder)
                for folder in _upwards(root / "memory", path)
                if _limit(folder / "memory.limit_in_bytes")
            ]
    return tuple(found)


def tightest(limits: Sequence[MemoryLimit]) -> MemoryLimit:
    """The one that leaves least."""
    return min(limits, key=lambda limit: limit.left)


def check_memory(needed: int, what: str, limits: Sequence[MemoryLimit]) -> None:
    """Raises MemoryLimitError unless every limit leaves `needed` bytes for `what`."""
    for limit in limits:
        if limit.left < needed:
            raise MemoryLimitError(
                f"{what} needs {needed} bytes ({show_bytes(needed)}) of host memory, but {limit.name} is {limit.total} "
                f"({show_bytes(limit.total)}) and leaves {limit.left} ({show_bytes(limit.left)}): raise that limit or "
                "lower host_kv_budget, host_pages or (without a GPU) device_kv_budget, logical_pages, max_requests"
            )


def _upwards(base: Path, path: str) -> list[Path]:
    """Folders of a group and those above it that are there. In a container the path may be one of the host, which the
    container does not see; then only the base is there, and it is the container's own group."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    return [
        folder for depth in range(len(parts), -1, -1) if (folder := base.joinpath(*parts[:depth])).is_dir()
    ]  # fmt: skip


def _limit(file: Path) -> int:
    """0 where there is no limit."""
    text = _read(file)
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else 0


def _version2(folder: Path) -> MemoryLimit:
    cache = _numbers(folder / "memory.stat")
    used = int(_read(folder / "memory.current") or 0) - cache.get("inactive_file", 0) - cache.get("active_file", 0)
    return MemoryLimit(str(folder / "memory.max"), _limit(folder / "memory.max"), max(0, used))


def _version1(folder: Path) -> MemoryLimit:
    cache = _numbers(folder / "memory.stat")
    cached = cache.get("total_inactive_file", 0) + cache.get("total_active_file", 0)
    used = int(_read(folder / "memory.usage_in_bytes") or 0) - cached
    file = folder / "memory.limit_in_bytes"
    return MemoryLimit(str(file), _limit(file), max(0, used))


def _numbers(file: Path) -> dict[str, int]:
    """Lines "name number" or "name: number kB"."""
    found: dict[str, int] = {}
    for line in _read(file).splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def _read(file: Path) -> str:
    """Empty where there is no such file, as at the root of version 2."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
