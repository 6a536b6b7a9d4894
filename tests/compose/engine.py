"""A docker engine of our own for one test run, where no registry can be reached: its data, socket and process id lie
in one folder, and the base image is made by debootstrap."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

BASE_IMAGE = "debian:bookworm-slim"
NEEDED = {
    "dockerd": "docker.io", "docker": "docker.io", "docker-compose": "docker-compose", "debootstrap": "debootstrap",
    "iptables-save": "iptables", "ip": "iproute2",
}  # fmt: skip
# What the image installs anyway, so that the build need not fetch it again.
BASE_PACKAGES = "ca-certificates,python3,libibverbs1,librdmacm1,libnuma1,libcurl4"
OUR_PROGRAMS = (b"dockerd", b"containerd", b"containerd-shim-runc-v2")
LINKS = Path("/sys/class/net")
BRIDGE = "docker0"
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
ALLOWED = "DSV4PD_ALLOW_NO_DOCKER"
START_S = 60
STOP_S = 60


class EngineUnavailable(RuntimeError):
    """No engine can be started here; the message says why."""


def fail_or_skip(error: EngineUnavailable) -> NoReturn:
    """Fails the test with the reason, unless the environment allows to skip it."""
    if os.environ.get(ALLOWED) == "1":
        pytest.skip(f"no docker engine can be started here: {error}")
    pytest.fail(f"no docker engine can be started here ({ALLOWED}=1 allows to skip): {error}")


@dataclass(frozen=True)
class Network:
    """What a daemon changes of this machine's network: its links, whether it forwards, its IPv4 firewall."""

    links: frozenset[str]
    forwarding: str
    firewall: str

    @classmethod
    def now(cls) -> Network:
        links = frozenset(link.name for link in LINKS.iterdir())
        return cls(links, FORWARDING.read_text(), _run(["iptables-save"], 20, None, None))

    def same_as(self, other: Network) -> bool:
        mine, others = firewall_rules(self.firewall), firewall_rules(other.firewall)
        return (self.links, self.forwarding, mine) == (other.links, other.forwarding, others)

    def restore(self) -> None:
        """Of links the daemon's own bridge alone: those of networks go with `compose down`. Writes nothing where nothing
        changed: a daemon that could not start may stand on a machine where nothing may be written."""
        now = Network.now()
        if now.same_as(self):
            return
        if BRIDGE in now.links - self.links:
            _run(["ip", "link", "delete", BRIDGE], 20, None, None)
        for text in (emptied_tables(self.firewall, now.firewall), self.firewall):
            subprocess.run(["iptables-restore"], input=text, text=True, env=_environment(), check=True, timeout=20)
        FORWARDING.write_text(self.forwarding)


def firewall_rules(saved: str) -> list[str]:
    """What iptables-save says that has an effect, in order: a table that is not loaded equals an empty one."""
    found: list[str] = []
    table = ""
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line
        elif line.startswith(":"):
            chain, policy, *_ = line.split()
            found += [] if policy == "ACCEPT" else [f"{table} {chain} {policy}"]
        elif line.startswith("-"):
            found.append(f"{table} {line}")
    return found


def emptied_tables(before: str, now: str) -> str:
    """For iptables-restore: every table of `now` that `before` lacks, without rules, its own chains accepting. Restoring
    `before` alone would leave them as they are."""
    kept: list[str] = []
    wanted = False
    for line in now.splitlines():
        if line.startswith("*"):
            wanted = line not in before.splitlines()
        if wanted and (line.startswith("*") or line == "COMMIT" or (line.startswith(":") and line.split()[1] != "-")):
            kept.append(f"{line.split()[0]} ACCEPT [0:0]" if line.startswith(":") else line)
    return "".join(f"{line}\n" for line in kept)


class Engine:
    """`start`, and `stop` even when that failed; between them `docker` and `compose` run commands against this engine alone."""

    def __init__(self) -> None:
        # Not pytest's folder: sockets in it must have short names.
        self.folder = Path(tempfile.mkdtemp(prefix="dsv4-engine-", dir="/tmp"))
        self.socket = f"unix://{self.folder}/docker.sock"
        self._log = self.folder / "dockerd.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._before: Network | None = None

    def start(self) -> None:
        """Raises EngineUnavailable."""
        _install_missing()
        if others := _other_daemons():
            # Two daemons overwrite each other's firewall rules, whatever folders they have.
            raise EngineUnavailable(f"another dockerd runs here: {others}")
        try:
            self._before = Network.now()
        except (OSError, AssertionError) as error:
            raise EngineUnavailable(f"this machine's network can't be read: {error}") from error
        command = ["dockerd", "-H", self.socket]
        for flag, name in (("--data-root", "data"), ("--exec-root", "exec"), ("--pidfile", "docker.pid")):
            command += [flag, str(self.folder / name)]
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C is for the test, which then stops it in order.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=_environment(), start_new_session=True
            )
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            if self._answers():
                return
            time.sleep(0.3)
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
        raise EngineUnavailable(f"dockerd did not come up:\n{tail}")

    def _answers(self) -> bool:
        try:
            self.docker("info", timeout_s=10)
        except (AssertionError, subprocess.TimeoutExpired):
            return False
        return True

    def stop(self) -> None:
        """Ends the daemon, which ends its containerd; folder, bridge and firewall rules go. May be called in any state.

        Raises AssertionError if a process had to be killed, or if a mount or something of the network is left.
        """
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        end = time.monotonic() + STOP_S
        while (left := self._processes()) and time.monotonic() < end:
            time.sleep(0.2)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for point in reversed(self._mounts()):
            subprocess.run(["umount", "-l", point], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._before is not None:
            self._before.restore()
            assert Network.now().same_as(self._before), f"before: {self._before}\nleft: {Network.now()}"
        assert not left, f"processes of the engine were left after {STOP_S} s: {left}"
        assert self._mounts() == []
        assert not self.folder.exists()

    def _mounts(self) -> list[str]:
        points = [line.split(" ")[1] for line in Path("/proc/mounts").read_text().splitlines()]
        return [point for point in points if point.startswith(f"{self.folder}/")]

    def _processes(self) -> list[int]:
        """Those whose command line names our folder: dockerd, containerd and its shims."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            program = words[0].rpartition(b"/")[2]
            if program in OUR_PROGRAMS and any(bytes(self.folder) in word for word in words):
                found.append(int(entry.name))
        return found

    def docker(self, *words: str, timeout_s: float = 120) -> str:
        """Standard output; raises AssertionError with both outputs when the command fails."""
        return _run(["docker", "-H", self.socket, *words], timeout_s, None, None)

    def import_base(self) -> None:
        """Makes Debian 12 from the package source that this machine uses, under the tag that the Dockerfile names.

        Raises EngineUnavailable when it can't be made, or when the engine can't run it.
        """
        root = self.folder / "base"
        bootstrap = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(root)]
        try:
            _run([*bootstrap, _debian_mirror()], 400, None, None)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise EngineUnavailable(f"the base image can't be made: {error}") from error
        for kept in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(root / kept)
            (root / kept / "partial").mkdir(parents=True)
        packed = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(
            ["docker", "-H", self.socket, "import", "-", BASE_IMAGE],
            stdin=packed.stdout,
            check=True,
            capture_output=True,
        )
        assert packed.wait() == 0
        shutil.rmtree(root)
        try:
            self.docker("run", "--rm", "--network", "none", BASE_IMAGE, "true")
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise EngineUnavailable(f"the engine can't run a container: {error}") from error


class Project:
    """The compose project of one folder on one engine."""

    def __init__(self, engine: Engine, folder: Path, environment: dict[str, str]) -> None:
        self._engine, self._folder = engine, folder
        # Without DOCKER_HOST of the caller, and with the classic builder, which needs no further image.
        self._environment = {**os.environ, "DOCKER_HOST": engine.socket, "DOCKER_BUILDKIT": "0", **environment}

    def compose(self, *words: str, timeout_s: float = 120) -> str:
        """Standard output; raises AssertionError with both outputs when the command fails."""
        return _run(["docker-compose", *words], timeout_s, self._folder, self._environment)

    def containers(self, service: str) -> list[str]:
        """Ids of the service's containers, running or not."""
        return self.compose("ps", "-q", service).split()

    def state(self, container: str, template: str) -> Any:
        return self._engine.docker("inspect", "-f", template, container).strip()


def _run(command: list[str], timeout_s: float, folder: Path | None, environment: dict[str, str] | None) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment or _environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, (
        f"{' '.join(command)}: status {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout


def _install_missing() -> None:
    missing = sorted({package for program, package in NEEDED.items() if shutil.which(program, path=_path()) is None})
    if os.geteuid() != 0:
        raise EngineUnavailable("starting dockerd needs root")
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise EngineUnavailable(f"these are missing and there is no apt-get: {missing}")
    # RUNLEVEL 1: the package must not start a daemon of its own.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        try:
            _run(["apt-get", "-qq", *words], 300, None, environment)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise EngineUnavailable(f"apt-get {' '.join(words)} failed: {error}") from error


def _other_daemons() -> list[int]:
    return [int(file.parent.name) for file in Path("/proc").glob("[0-9]*/comm") if _text_of(file) == "dockerd"]


def _text_of(file: Path) -> str:
    """Of a file of a process, which may be over by now."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _path() -> str:
    """Also where administrators' programs are, which a user's PATH may lack."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _path()}


def _debian_mirror() -> str:
    """The first Debian archive among this machine's package sources."""
    folder = Path("/etc/apt")
    for file in [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]:
        for line in file.read_text().splitlines() if file.is_file() else []:
            for word in line.split() if not line.startswith("#") else []:
                if word.startswith("http") and word.rstrip("/").endswith("/debian"):
                    return word
    return "http://deb.debian.org/debian"
