"""Every process of a running system is restarted, one after the other, and no client notices."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.balancer import Balancer
from tests.support.processes import Service

pytestmark = [pytest.mark.system, pytest.mark.slow]
CLIENTS = 4
TOKENS = 12
PROMPTS = ["short ", "of some length, " * 12, "longer than one chunk of tokens, " * 20]
DRAIN_S = 20


@dataclass
class System:
    """Two of each, on fixed ports, so that a restarted process is found where it was."""

    model: Path
    folder: Path
    prefill: list[Service] = field(default_factory=list)
    decode: list[Service] = field(default_factory=list)
    routers: list[Service] = field(default_factory=list)

    def start(self) -> System:
        common = ("--model", str(self.model), "--drain-timeout-s", str(DRAIN_S))
        small = ("--threads", "1", "--send-ring-bytes", str(32 << 20))
        pools = ("--threads", "1", "--host-pages", "96", "--logical-pages", "96", "--max-requests", "8")
        for n in range(2):
            self.prefill.append(Service("prefill_service", self.folder, *common, *small, name=f"prefill{n}").launch())
            self.decode.append(Service("decode_service", self.folder, *common, *pools, name=f"decode{n}").launch())
        for worker in [*self.prefill, *self.decode]:
            worker.wait_ready()
        lists = (
            "--prefill",
            ",".join(w.address for w in self.prefill),
            "--decode",
            ",".join(w.address for w in self.decode),
        )
        for n in range(2):
            flags = (*common, *lists, "--poll-interval-s", "0.2", "--drain-notice-s", "1")
            self.routers.append(Service("router_service", self.folder, *flags, name=f"router{n}").launch())
        self.wait_all_usable()
        return self

    def wait_all_usable(self) -> None:
        """Every router knows every worker as usable."""
        end = time.monotonic() + 90
        while time.monotonic() < end:
            try:
                shown = [httpx.get(f"http://{self.address(r)}/ready", timeout=5).json() for r in self.routers]
            except (httpx.HTTPError, FileNotFoundError):
                shown = []
            if shown and all(
                s["ready"] and {*s["workers"]["prefill"].values(), *s["workers"]["decode"].values()} == {"usable"}
                for s in shown
            ):
                return
            time.sleep(0.1)
        raise AssertionError("\n".join(r.log_tail() for r in self.routers))

    def address(self, router: Service) -> str:
        return (self.folder / f"{router.name}.port").read_text()

    def restart(self, service: Service) -> int:
        """As an operator's script does it: SIGTERM, wait for the end, start, wait until it is used."""
        port = int((self.folder / f"{service.name}.port").read_text().rpartition(":")[2])
        service.signal(signal.SIGTERM)
        assert service.process is not None
        status = service.process.wait(DRAIN_S + 10)
        service.launch(port)
        if service in self.routers:
            end = time.monotonic() + 60
            while not (self.folder / f"{service.name}.port").exists() and time.monotonic() < end:
                time.sleep(0.05)
        else:
            service.wait_ready()
        self.wait_all_usable()
        return status

    def stop(self) -> None:
        for service in [*self.routers, *self.decode, *self.prefill]:
            service.stop(DRAIN_S + 10)


@dataclass
class Load:
    """Clients that ask without pause and never try again; each answer is checked against the first of its kind."""

    url: str
    stopping: threading.Event = field(default_factory=threading.Event)
    outcomes: Counter[str] = field(default_factory=Counter)
    texts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self, number: int) -> None:
        turn = number
        while not self.stopping.is_set():
            prompt = PROMPTS[turn % len(PROMPTS)]
            stream = turn % 2 == 0
            turn += 1
            try:
                text = self.ask(prompt, stream)
            except Exception as error:  # noqa: BLE001 - whatever a client would see
                self.problems.append(f"{time.strftime('%X')} {prompt[:10]!r} stream={stream}: {error!r}")
                continue
            if text != self.texts.setdefault(prompt, text):
                self.problems.append(f"{prompt[:10]!r}: {text!r} is not {self.texts[prompt]!r}")
            self.outcomes["stream" if stream else "whole"] += 1

    def ask(self, prompt: str, stream: bool) -> str:
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code}: {answer.text}")
        if not stream:
            choice = answer.json()["choices"][0]
            assert (choice["finish_reason"], answer.json()["usage"]["completion_tokens"]) == ("length", TOKENS)
            return choice["text"]
        parts = answer.text.split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""], parts[-3:]
        chunks = [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length", chunks[-1]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.fixture
def system(checkpoint: Path, tmp_path: Path) -> Iterator[System]:
    made = System(checkpoint, tmp_path)
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.mark.timeout(600)
def test_a_rolling_restart_of_every_process_loses_no_request(system: System):
    balancer = Balancer([system.address(router) for router in system.routers]).start()
    load = Load(balancer.url)
    time.sleep(0.5)
    clients = [threading.Thread(target=load.run, args=(number,)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    statuses: dict[str, int] = {}
    during: dict[str, int] = {}
    for service in [*system.prefill, *system.decode, *system.routers]:
        before = sum(load.outcomes.values())
        statuses[service.name] = system.restart(service)
        during[service.name] = sum(load.outcomes.values()) - before
    load.stopping.set()
    for client in clients:
        client.join(60)
    balancer.stop()
    assert load.problems == []
    assert set(statuses.values()) == {0}, statuses
    # There was load during every restart, else this shows nothing.
    assert min(during.values()) >= CLIENTS, during
    assert len(load.texts) == len(PROMPTS)
    for worker in [*system.prefill, *system.decode]:
        worker.wait_idle(10)
