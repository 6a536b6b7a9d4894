"""Any history of requests with a tiny pool: every event comes once, everything comes back, nothing is owned twice."""

import pytest
import structlog
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from common.errors import ErrorReason, ServiceError
from common.sampling import SampledToken
from decode_service.request import FailedEvent, FinishedEvent, ReservedEvent
from tests.unit.decode.test_engine import Client, Rig, with_prefix

PAGES, SLOTS, BATCH, QUEUE = 12, 4, 3, 3
TERMINAL = (FinishedEvent, FailedEvent)


class Life(RuleBasedStateMachine):
    """The engine without its thread, so that a history that fails can be run again."""

    steps = 0

    @initialize(
        overtakes=st.integers(0, 2), resident=st.integers(0, 5), staging=st.sampled_from([0, 0, 5]), cache=st.booleans()
    )
    def begin(self, overtakes: int, resident: int, staging: int, cache: bool) -> None:
        make = with_prefix if cache else Rig
        self.rig = make(
            pages=PAGES, slots=SLOTS, max_batch=BATCH, max_queued=QUEUE, max_overtakes=overtakes,
            resident_pages=resident, staging_pages=staging, start=False,
        )  # fmt: skip
        self.clients: list[Client] = []
        self.admitted: set[int] = set()
        self.set_aside: list[Client] = []

    @rule(prompt=st.sampled_from([1, 8, 255, 256, 257, 511, 513, 900, 1300, 2000]), output=st.integers(1, 300))
    def submit(self, prompt: int, output: int) -> None:
        client = self.rig.request(prompt=prompt, max_tokens=output)
        waiting = sum(c.request.phase == "queued" for c in self.clients)
        never = not self.rig.pools.fits_ever(prompt + output, prompt)
        if never or waiting == QUEUE:
            with pytest.raises(ServiceError) as raised:
                self.rig.engine.submit(client.request)
            assert raised.value.reason is (ErrorReason.POOL_EXHAUSTED if never else ErrorReason.QUEUE_FULL)
            assert not client.events
        else:
            self.rig.engine.submit(client.request)
            self.clients.append(client)
        self.turn()

    @precondition(lambda self: self.of("prefilling"))
    @rule(pick=st.integers(0, 99), token=st.integers(0, 400))
    def admit(self, pick: int, token: int) -> None:
        client = self.one(self.of("prefilling"), pick)
        self.rig.engine.admit(client.request, SampledToken(token, 0.0))
        self.admitted.add(client.request.generation)
        aborted = bool(client.seen(FinishedEvent))
        self.turn()
        assert client.tokens[:1] == ([] if aborted else [token])

    @precondition(lambda self: self.clients)
    @rule(pick=st.integers(0, 99))
    def admit_late(self, pick: int) -> None:
        """A message that comes late or twice changes nothing."""
        client = self.one(self.clients, pick)
        if client.request.phase != "prefilling":
            self.rig.engine.admit(client.request, SampledToken(0, 0.0))
            if client.request.phase != "running":
                before = list(client.events)
                self.turn()
                assert client.request.phase != "ended" or client.events == before

    @rule(turns=st.integers(1, 40))
    def decode(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()

    @precondition(lambda self: self.of("running"))
    @rule(pick=st.integers(0, 99), nan=st.booleans())
    def step_fails(self, pick: int, nan: bool) -> None:
        """NaN costs the request that has it; a step that raises costs all that were in it."""
        before = self.of("running")

        def trouble(_: list[int], logits: torch.Tensor) -> None:
            if not nan:
                raise RuntimeError("the step fails")
            logits[pick % len(logits)] = torch.nan

        self.rig.model.trouble = trouble
        self.turn()
        self.rig.model.trouble = lambda _tokens, _logits: None
        failed = [client for client in before if client.seen(FailedEvent)]
        assert len(failed) == (1 if nan else min(BATCH, len(before)))

    @precondition(lambda self: self.clients)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        self.rig.engine.abort(self.one(self.clients, pick).request)
        self.turn()

    @precondition(lambda self: self.clients)
    @rule(pick=st.integers(0, 99), times=st.integers(1, 2))
    def release(self, pick: int, times: int) -> None:
        client = self.one(self.clients, pick)
        if client.request.phase == "draining":
            return
        for _ in range(times):
            self.rig.engine.release(client.request)
        self.turn()
        assert client.request.phase == "ended"

    @precondition(lambda self: self.of("prefilling"))
    @rule(pick=st.integers(0, 99))
    def writer_vanishes(self, pick: int) -> None:
        client = self.one(self.of("prefilling"), pick)
        self.rig.engine.quarantine(client.request)
        self.turn()
        assert client.request.phase == "draining"

    @precondition(lambda self: self.of("draining"))
    @rule(pick=st.integers(0, 99))
    def writer_is_gone(self, pick: int) -> None:
        client = self.one(self.of("draining"), pick)
        self.rig.engine.unquarantine(client.request)
        self.turn()
        assert client.request.phase == "ended"

    @precondition(lambda self: self.rig.pools.prefix is not None)
    @rule()
    def flush(self) -> None:
        assert self.rig.pools.prefix is not None
        self.rig.pools.prefix.clear()

    @rule()
    def drain(self) -> None:
        """As a service that is told to stop: those that run finish, the others are aborted and give memory back."""
        for client in self.of("queued", "prefilling"):
            self.rig.engine.abort(client.request)
            self.rig.engine.release(client.request)
        while self.of("running"):
            self.turn()
        for client in self.of("draining"):
            self.rig.engine.unquarantine(client.request)
        self.turn()
        assert not self.rig.engine.requests()
        self.all_is_back()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.drain()

    def all_is_back(self) -> None:
        for use in self.rig.pools.use():
            assert (use.used, use.quarantined, use.free + use.cached) == (0, 0, use.total), use
        prefix = self.rig.pools.prefix
        if prefix is not None:
            prefix.clear()
        assert all(use.free == use.total for use in self.rig.pools.use())

    def turn(self) -> None:
        Life.steps += 1
        engine = self.rig.engine
        engine.turn()
        checked = engine.check_integrity()
        engine._take_commands(0.0)
        checked.result(0)
        for client in self.clients:
            self.check_events(client)
        self.clients = [client for client in self.clients if client.request.phase != "ended"]

    def check_events(self, client: Client) -> None:
        kinds = [type(event) for event in client.events]
        ended = [kind for kind in kinds if kind in TERMINAL]
        assert len(ended) <= 1
        assert kinds.count(ReservedEvent) <= 1
        first, made = client.tokens[:1], client.tokens
        assert made == [(first[0] + place) % 500 for place in range(len(made))] if made else True
        assert len(made) <= client.request.sampling.settings.max_tokens
        if client.request.phase == "running":
            assert client.request.generation in self.admitted
            assert not ended

    def of(self, *phases: str) -> list[Client]:
        return [client for client in getattr(self, "clients", []) if client.request.phase in phases]

    @staticmethod
    def one(clients: list[Client], pick: int) -> Client:
        return clients[pick % len(clients)]


def test_ten_thousand_steps_give_everything_back():
    checked = settings(max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))
    Life.steps = 0
    # Failed steps are logged with all their values, which takes longer than the steps.
    with structlog.testing.capture_logs():
        run_state_machine_as_test(Life, settings=checked)
    assert Life.steps >= 10_000
