"""Two hosts on one machine: network namespaces behind a bridge, whose links can be cut, one way or both, or slowed.

Needs root and iproute2; `why_not` says what is missing. tc's blackhole drops what leaves through it, tbf slows it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

SUBNET = "10.213.77"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


def why_not() -> str:
    """Why namespaces can't be made here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "network namespaces need iproute2"
    try:
        with Hosts("why", ()):
            pass
    except subprocess.CalledProcessError as error:
        return f"no network namespace here: {error.stderr.decode().strip()}"
    return ""


class Hosts:
    """Namespaces on one bridge; host i is at SUBNET.(i+1), this process at SUBNET.254. A context manager."""

    def __init__(self, name: str, hosts: Sequence[str]) -> None:
        self._bridge = f"dp{name[:6]}"
        self._hosts = {host: f"dp{name[:6]}{index}" for index, host in enumerate(hosts)}

    def address(self, host: str) -> str:
        return f"{SUBNET}.{list(self._hosts).index(host) + 1}"

    def inside(self, host: str) -> list[str]:
        """What to put before a command that runs on that host."""
        return ["ip", "netns", "exec", self._hosts[host]]

    def __enter__(self) -> Hosts:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{SUBNET}.254/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for host, space in self._hosts.items():
                _ip("netns", "add", space)
                _ip("link", "add", f"{space}o", "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("link", "set", f"{space}o", "master", self._bridge, "up")
                _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
                _ip("-n", space, "link", "set", "lo", "up")
        except subprocess.CalledProcessError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for space in self._hosts.values():
            # A namespace outlives its name while a process of it is ending; its link must not.
            subprocess.run(["ip", "link", "del", f"{space}o"], check=False, capture_output=True, timeout=10)
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True, timeout=10)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True, timeout=10)

    def cut(self, host: str, *, to_it: bool, from_it: bool) -> None:
        """Drops what goes to and what comes from a host."""
        if from_it:
            self._queue(self._hosts[host], "eth0", "blackhole")
        if to_it:
            self._queue("", f"{self._hosts[host]}o", "blackhole")

    def slow(self, host: str, rate: str) -> None:
        """What comes from a host goes at `rate`, as in "8mbit"."""
        self._queue(self._hosts[host], "eth0", "tbf", "rate", rate, "burst", "64kbit", "latency", "400ms")

    def heal(self, host: str) -> None:
        for space, device in ((self._hosts[host], "eth0"), ("", f"{self._hosts[host]}o")):
            inside = ["-n", space] if space else []
            subprocess.run(["tc", *inside, "qdisc", "del", "dev", device, "root"], check=False, capture_output=True)

    def _queue(self, space: str, device: str, *discipline: str) -> None:
        inside = ["-n", space] if space else []
        subprocess.run(
            ["tc", *inside, "qdisc", "replace", "dev", device, "root", *discipline],
            check=True,
            capture_output=True,
            timeout=10,
        )
