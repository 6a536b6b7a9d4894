"""Two hosts on one machine: network namespaces with a cable between them that can be cut, one way or both, or slowed.

No bridge: a firewall of this machine (docker brings one) would drop what it forwards. This process reaches each host
by a cable of its own. Needs root and iproute2; `why_not` says what is missing. tc's blackhole drops what leaves through it, tbf slows it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

SUBNET = "10.213.77"
OWN_SUBNETS = ("10.213.78", "10.213.79")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


def why_not() -> str:
    """Why namespaces can't be made here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "network namespaces need iproute2"
    try:
        with Hosts("why", ("a", "b")):
            pass
    except subprocess.CalledProcessError as error:
        return f"no network namespace here: {error.stderr.decode().strip()}"
    return ""


class Hosts:
    """Host i is at SUBNET.(i+1), also for this process. A context manager. Raises ValueError unless there are two."""

    def __init__(self, name: str, hosts: Sequence[str]) -> None:
        if len(hosts) != 2:
            raise ValueError(f"{len(hosts)} hosts, not two")
        self._hosts = {host: f"dp{name[:6]}{index}" for index, host in enumerate(hosts)}

    def address(self, host: str) -> str:
        return f"{SUBNET}.{list(self._hosts).index(host) + 1}"

    def inside(self, host: str) -> list[str]:
        """What to put before a command that runs on that host."""
        return ["ip", "netns", "exec", self._hosts[host]]

    def __enter__(self) -> Hosts:
        try:
            first, second = self._hosts.values()
            for space in (first, second):
                _ip("netns", "add", space)
            _ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
            for (host, space), own in zip(self._hosts.items(), OWN_SUBNETS, strict=True):
                _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
                _ip("-n", space, "link", "set", "lo", "up")
                _ip("link", "add", f"{space}o", "type", "veth", "peer", "name", "own", "netns", space)
                _ip("-n", space, "addr", "add", f"{own}.1/24", "dev", "own")
                _ip("-n", space, "link", "set", "own", "up")
                _ip("addr", "add", f"{own}.254/24", "dev", f"{space}o")
                _ip("link", "set", f"{space}o", "up")
                _ip("route", "add", f"{self.address(host)}/32", "dev", f"{space}o", "src", f"{own}.254")
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

    def cut(self, host: str, *, to_it: bool, from_it: bool) -> None:
        """Drops what goes from the other host to this one, and what comes from it."""
        if from_it:
            self._queue(self._hosts[host], "blackhole")
        if to_it:
            self._queue(self._other(host), "blackhole")

    def slow(self, host: str, rate: str) -> None:
        """What a host sends to the other goes at `rate`, as in "8mbit"."""
        self._queue(self._hosts[host], "tbf", "rate", rate, "burst", "64kbit", "latency", "400ms")

    def heal(self) -> None:
        """Both directions are whole and fast again."""
        for space in self._hosts.values():
            subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", "eth0", "root"], check=False, capture_output=True)

    def _other(self, host: str) -> str:
        return next(space for name, space in self._hosts.items() if name != host)

    def _queue(self, space: str, *discipline: str) -> None:
        command = ["tc", "-n", space, "qdisc", "replace", "dev", "eth0", "root", *discipline]
        subprocess.run(command, check=True, capture_output=True, timeout=10)
