"""The engine thread: who gets memory, who is in a step, and that one request's trouble is nobody else's."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import ErrorReason, ServiceError
from common.kernels.cpu import cpu_kernels
from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from common.sampling import SampledToken, SamplingSettings, SamplingState
from decode_service.device_pools import DevicePools
from decode_service.engine import DecodeEngine
from decode_service.hisparse import HiSparseCoordinator
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.metrics import DecodeMetrics
from decode_service.prefix_cache import PrefixCache
from decode_service.request import DecodeRequest, Event, FailedEvent, FinishedEvent, ReservedEvent, TokenEvent
from decode_service.resources import ResourcePools
from decode_service.staging import StagingPool

CONFIG = ModelConfig.from_dict(small_config())
WAIT_S = 5.0
VOCAB = 500


class CountingModel:
    """The next token is the last one plus 1. `trouble` may spoil a step's logits."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.trouble: Callable[[list[int], Tensor], None] = lambda _tokens, _logits: None

    def decode(self, tokens: Tensor, kv: Any) -> Tensor:
        ids = tokens.tolist()
        self.steps.append(ids)
        logits = torch.zeros(len(ids), VOCAB)
        logits[torch.arange(len(ids)), (tokens + 1) % VOCAB] = 1
        self.trouble(ids, logits)
        return logits


class Rig:
    def __init__(
        self, pages: int = 16, slots: int = 8, max_batch: int = 4, max_queued: int = 4, staging_pages: int = 0,
        max_overtakes: int = 0, resident_pages: int = 0, start: bool = True,
    ) -> None:  # fmt: skip
        kernels = cpu_kernels()
        self.model = CountingModel()
        self.host = DeepSeekV4PagedHostPool(CONFIG.layers_of(4), pages, kernels, 1)
        device = self.device = DevicePools.of(CONFIG, pages, slots, 1)
        self.hisparse = HiSparseCoordinator(
            self.host, kernels, slots, CONFIG.index_topk, 1, resident_pages=resident_pages
        )
        self.staging = StagingPool(CONFIG.layers_of(4), staging_pages, kernels, 1) if staging_pages else None
        self.pools = ResourcePools(
            self.host, device, self.hisparse.slots, self.staging, resident=self.hisparse.resident.allocator
        )
        self.metrics = DecodeMetrics()
        model: Any = self.model
        staged = (self.staging, self.host) if self.staging is not None else None
        self.engine = DecodeEngine(
            model, kernels, device, self.hisparse, self.pools, self.metrics, max_batch, max_queued, 4096, staged,
            max_overtakes,
        )  # fmt: skip
        if start:
            self.engine.start()
        self.made = 0

    def request(self, prompt: int = 8, **sampling: Any) -> "Client":
        self.made += 1
        return Client(self.made, prompt, {"max_tokens": 6, "ignore_eos": True} | sampling)

    def run(self, client: "Client", first: int) -> "Client":
        """Submits and, once memory is there, admits with the first token `first`."""
        self.engine.submit(client.request)
        client.wait(ReservedEvent)
        self.engine.admit(client.request, SampledToken(first, 0.0))
        return client

    def run_together(self, clients: list["Client"], firsts: list[int]) -> None:
        """Admits all of them before the next step."""
        for client in clients:
            self.engine.submit(client.request)
            client.wait(ReservedEvent)
        hold = threading.Event()
        self.engine.call(lambda: hold.wait(WAIT_S))
        for client, first in zip(clients, firsts, strict=True):
            self.engine.admit(client.request, SampledToken(first, 0.0))
        hold.set()

    def idle(self) -> bool:
        return not self.engine.requests() and all(use.free == use.total for use in self.pools.use())

    def sound(self) -> None:
        self.engine.check_integrity().result(WAIT_S)


class Client:
    def __init__(self, generation: int, prompt: int, sampling: dict[str, Any]) -> None:
        self.events: list[Event] = []
        self.changed = threading.Condition()
        state = SamplingState(SamplingSettings(**sampling), [5] * prompt, (1,))
        self.request = DecodeRequest(f"r{generation}", generation, [5] * prompt, state, self._emit)

    def _emit(self, event: Event) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait(self, kind: type, seconds: float = WAIT_S) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: self.seen(kind), seconds), f"no {kind.__name__}: {self.events}"
            return self.seen(kind)[0]

    def seen(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def tokens(self) -> list[int]:
        return [event.token.token_id for event in self.seen(TokenEvent)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    assert made.engine._thread.is_alive()
    made.engine.stop(WAIT_S)


def test_requests_run_together_and_give_everything_back(rig: Rig):
    clients = [rig.run(rig.request(max_tokens=3 + i), 10 * i) for i in range(4)]
    for i, client in enumerate(clients):
        assert client.wait(FinishedEvent).reason == "length"
        assert client.tokens == list(range(10 * i, 10 * i + 3 + i))
    assert rig.idle()
    rig.sound()


def test_stop_token_and_a_first_token_that_ends_it(rig: Rig):
    stopped = rig.run(rig.request(stop_token_ids=(12,)), 10)
    assert (stopped.wait(FinishedEvent).reason, stopped.tokens) == ("stop", [10, 11, 12])
    at_once = rig.run(rig.request(stop_token_ids=(12,)), 12)
    assert (at_once.wait(FinishedEvent).stop_token_id, at_once.tokens) == (12, [12])
    single = rig.run(rig.request(max_tokens=1), 3)
    assert (single.wait(FinishedEvent).reason, single.tokens) == ("length", [3])
    assert rig.idle()


def test_more_running_requests_than_a_step_takes_turns():
    rig = Rig(max_batch=3, slots=9)
    # Some end in the midst of it: those who waited must not be put behind those who just ran.
    limits = [3, 3, 40, 5, 40, 40, 7, 40, 40]
    clients = [rig.request(max_tokens=limit) for limit in limits]
    rig.run_together(clients, [50 * i for i in range(9)])
    for client in clients:
        client.wait(FinishedEvent)
    last = dict.fromkeys(range(9), -1)
    for number, step in enumerate(rig.model.steps):
        for token in step:
            assert number - last[token // 50] <= 3
            last[token // 50] = number
    assert [len(client.tokens) for client in clients] == limits
    assert rig.idle()
    rig.engine.stop(WAIT_S)


def test_first_come_first_served_also_when_a_later_one_would_fit(rig: Rig):
    holder, big, small = rig.request(prompt=15 * 256 - 10), rig.request(prompt=2 * 256 - 10), rig.request()
    for client in (holder, big, small):
        rig.engine.submit(client.request)
    holder.wait(ReservedEvent)
    rig.sound()
    assert not big.events
    assert not small.events
    rig.engine.release(holder.request).result(WAIT_S)
    big.wait(ReservedEvent)
    small.wait(ReservedEvent)
    rig.sound()
    for client in (big, small):
        rig.engine.release(client.request).result(WAIT_S)
    assert rig.idle()


@pytest.mark.parametrize("phase", ["queued", "prefilling", "running"])
def test_release_in_any_phase_gives_everything_back_once(phase: str):
    rig = Rig(slots=1)
    client = rig.request(max_tokens=4000)
    if phase == "queued":
        other = rig.run(rig.request(max_tokens=4000), 0)
        rig.engine.submit(client.request)
        rig.engine.release(client.request).result(WAIT_S)
        assert not client.seen(ReservedEvent)
        rig.engine.release(other.request).result(WAIT_S)
    elif phase == "prefilling":
        rig.engine.submit(client.request)
        client.wait(ReservedEvent)
    else:
        rig.run(client, 0)
        client.wait(TokenEvent)
    for _ in range(2):
        rig.engine.release(client.request).result(WAIT_S)
    assert rig.idle()
    rig.sound()
    # Whatever comes late for it is ignored and counted.
    rig.engine.admit(client.request, SampledToken(3, 0.0))
    rig.sound()
    assert rig.metrics.registry.get_sample_value("dsv4pd_decode_late_events_total") == 1
    assert rig.idle()
    rig.engine.stop(WAIT_S)


def test_an_abort_ends_a_running_request_and_tells_a_waiting_one(rig: Rig):
    running = rig.run(rig.request(max_tokens=4000), 0)
    running.wait(TokenEvent)
    rig.engine.abort(running.request)
    assert running.wait(FinishedEvent).reason == "abort"
    waiting = rig.request()
    rig.engine.submit(waiting.request)
    waiting.wait(ReservedEvent)
    rig.engine.abort(waiting.request)
    assert waiting.wait(FinishedEvent).reason == "abort"
    # Its writer may be alive: the memory is still its own until the stream gives it back.
    assert not rig.idle()
    rig.engine.release(waiting.request).result(WAIT_S)
    assert rig.idle()


def test_a_failing_step_fails_its_requests_and_nothing_else(rig: Rig):
    def explode(tokens: list[int], logits: Tensor) -> None:
        if 13 in tokens:
            raise RuntimeError("bad weights")

    rig.model.trouble = explode
    client = rig.run(rig.request(), 10)
    error = client.wait(FailedEvent).error
    assert error.reason is ErrorReason.INTERNAL
    assert "bad weights" in error.message
    assert rig.idle()
    assert rig.run(rig.request(), 20).wait(FinishedEvent).reason == "length"


def test_nan_logits_fail_only_their_own_request(rig: Rig):
    def spoil(tokens: list[int], logits: Tensor) -> None:
        for row, token in enumerate(tokens):
            if token == 12:
                logits[row, 7] = torch.nan

    rig.model.trouble = spoil
    good, bad = rig.request(), rig.request()
    rig.run_together([good, bad], [20, 10])
    assert "NaN" in bad.wait(FailedEvent).error.message
    assert bad.tokens == [10, 11, 12]
    good.wait(FinishedEvent)
    assert good.tokens == list(range(20, 26))
    assert rig.idle()


def test_a_failing_admission_fails_only_its_own_request(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    original = rig.hisparse.admit_request_direct

    def fail_once(resources: Any, tokens: int) -> None:
        monkeypatch.setattr(rig.hisparse, "admit_request_direct", original)
        raise ValueError("host row 9 is not in [0, 4)")

    monkeypatch.setattr(rig.hisparse, "admit_request_direct", fail_once)
    error = rig.run(rig.request(), 0).wait(FailedEvent).error
    assert error.reason is ErrorReason.INTERNAL
    assert "host row 9" in error.message
    assert rig.idle()
    rig.run(rig.request(), 0).wait(FinishedEvent)


def test_a_failing_call_is_the_callers_and_the_thread_goes_on(rig: Rig):
    with pytest.raises(ZeroDivisionError):
        rig.engine.call(lambda: 1 // 0).result(WAIT_S)
    rig.engine._command(lambda: [][0])
    rig.run(rig.request(), 0).wait(FinishedEvent)


def test_a_full_queue_refuses_with_a_hint():
    rig = Rig(slots=1, max_queued=2)
    rig.run(rig.request(max_tokens=4000), 0).wait(TokenEvent)
    for _ in range(2):
        rig.engine.submit(rig.request().request)
    with pytest.raises(ServiceError) as raised:
        rig.engine.submit(rig.request().request)
    assert raised.value.reason is ErrorReason.QUEUE_FULL
    assert raised.value.retry_after_s > 0
    assert raised.value.ours == "2"
    rig.engine.stop(WAIT_S)


def test_an_aborted_request_is_told_once_and_never_runs(rig: Rig):
    client = rig.request()
    rig.engine.submit(client.request)
    client.wait(ReservedEvent)
    rig.engine.abort(client.request)
    rig.engine.abort(client.request)
    rig.engine.admit(client.request, SampledToken(3, 0.0))
    rig.sound()
    assert [type(event) for event in client.events] == [ReservedEvent, FinishedEvent]
    assert client.request.phase == "prefilling"
    rig.engine.release(client.request).result(WAIT_S)
    assert rig.idle()


def test_short_requests_pass_a_long_one_that_does_not_fit_yet_and_it_gets_its_turn():
    rig = Rig(pages=16, max_queued=16, max_overtakes=3)
    holder = rig.request(prompt=2000)
    rig.engine.submit(holder.request)
    holder.wait(ReservedEvent)
    long = rig.request(prompt=3000)
    shorts = [rig.request() for _ in range(5)]
    for client in (long, *shorts):
        rig.engine.submit(client.request)
    for client in shorts[:3]:
        client.wait(ReservedEvent)
        # Without admission it would hold its memory for ever.
        rig.engine.release(client.request).result(WAIT_S)
    rig.sound()
    assert not long.events
    assert not shorts[3].events
    assert not shorts[4].events
    assert rig.metrics.overtakes._value.get() == 3
    rig.engine.release(holder.request).result(WAIT_S)
    long.wait(ReservedEvent)
    for client in shorts[3:]:
        client.wait(ReservedEvent)
    for client in (long, *shorts[3:]):
        rig.engine.release(client.request).result(WAIT_S)
    assert rig.idle()
    rig.engine.stop(WAIT_S)


def test_what_can_never_fit_is_refused_with_the_numbers(rig: Rig):
    with pytest.raises(ServiceError) as raised:
        rig.engine.submit(rig.request(prompt=4000, max_tokens=97).request)
    assert raised.value.reason is ErrorReason.CONTEXT_TOO_LONG
    assert (raised.value.ours, raised.value.theirs) == ("4096", "4097")
    small = Rig(pages=2)
    with pytest.raises(ServiceError, match=r"513 tokens .*host_c4 2, logical 2") as raised:
        small.engine.submit(small.request(prompt=500, max_tokens=13).request)
    assert raised.value.reason is ErrorReason.POOL_EXHAUSTED
    small.engine.stop(WAIT_S)


def test_a_living_id_is_refused_until_it_is_answered(rig: Rig):
    first, second = rig.request(), rig.request()
    second.request.request_id = first.request.request_id
    rig.engine.submit(first.request)
    with pytest.raises(ServiceError) as raised:
        rig.engine.submit(second.request)
    assert raised.value.reason is ErrorReason.DUPLICATE_REQUEST
    first.request.answered = True
    rig.engine.submit(second.request)


def test_quarantined_memory_is_nobodys_until_it_is_released(rig: Rig):
    client = rig.request(prompt=15 * 256)
    rig.engine.submit(client.request)
    resources = client.wait(ReservedEvent).resources
    rig.engine.quarantine(client.request).result(WAIT_S)
    rig.sound()
    use = {use.name: use for use in rig.pools.use()}
    assert use["host_c4"].quarantined == len(resources.host_pages)
    assert all(use[name].quarantined == 1 for name in ("window", "state", "hot"))
    behind = rig.request(prompt=3 * 256)
    rig.engine.submit(behind.request)
    rig.sound()
    assert not behind.events
    # A late result must not revive it.
    rig.engine.admit(client.request, SampledToken(3, 0.0))
    for _ in range(2):
        rig.engine.unquarantine(client.request).result(WAIT_S)
    behind.wait(ReservedEvent)
    assert not client.seen(TokenEvent)
    rig.sound()


def test_the_integrity_check_finds_a_page_that_nobody_holds(rig: Rig):
    rig.engine.call(lambda: rig.pools.reserve(300)).result(WAIT_S)
    with pytest.raises(ValueError, match=r"pool host_c4: requests name 0 owned pages, 2 are; in dispute: "):
        rig.sound()


def test_the_integrity_check_finds_two_requests_with_one_page(rig: Rig):
    clients = [rig.request(), rig.request()]
    for client in clients:
        rig.engine.submit(client.request)
        client.wait(ReservedEvent)
    rig.sound()
    clients[0].request.resources = clients[1].request.resources
    with pytest.raises(ValueError, match="pool host_c4: requests name 2 owned pages, 2 are"):
        rig.sound()


def with_prefix(**options: Any) -> Rig:
    rig = Rig(**{"slots": 3} | options)
    rig.pools.prefix = PrefixCache(rig.host.allocator, rig.device.logical, b"seed", keeps_output=True)
    return rig


def cached(rig: Rig) -> int:
    rig.sound()
    (use,) = [use for use in rig.pools.use() if use.name == "host_c4"]
    assert use.used == 0
    return use.cached


@pytest.mark.parametrize("staging_pages", [0, 8])
def test_a_finished_requests_full_pages_serve_the_next_prompt(staging_pages: int):
    rig = with_prefix(staging_pages=staging_pages)
    first = rig.run(rig.request(prompt=600, max_tokens=200), 0)
    first.wait(FinishedEvent)
    # 799 tokens were seen: 199 entries, of which the newest is not on the host; 192 fill three pages.
    assert cached(rig) == 3
    second = rig.request(prompt=530)
    rig.engine.submit(second.request)
    resources = second.wait(ReservedEvent).resources
    assert second.request.cached_tokens == 512
    assert list(resources.host_pages[:2]) == list(first.request.resources.host_pages[:2])
    assert len(resources.staging_pages) == (1 if staging_pages else 0)
    rig.sound()
    rig.engine.admit(second.request, SampledToken(3, 0.0))
    second.wait(FinishedEvent)
    assert cached(rig) == 3
    rig.engine.stop(WAIT_S)


@pytest.mark.parametrize("end", ["failed step", "failed handover", "quarantine"])
def test_pages_that_nobody_vouches_for_are_never_kept(end: str):
    rig = with_prefix()
    client = rig.request(prompt=600)
    if end == "failed step":

        def spoil(_tokens: list[int], logits: Tensor) -> None:
            logits.fill_(torch.nan)

        rig.model.trouble = spoil
        rig.run(client, 0).wait(FailedEvent)
    else:
        rig.engine.submit(client.request)
        client.wait(ReservedEvent)
        if end == "quarantine":
            rig.engine.quarantine(client.request).result(WAIT_S)
            rig.engine.unquarantine(client.request).result(WAIT_S)
        else:
            rig.engine.release(client.request).result(WAIT_S)
    assert cached(rig) == 0
    assert rig.idle()
    rig.engine.stop(WAIT_S)


def test_a_client_that_left_while_it_decoded_leaves_good_pages():
    rig = with_prefix()
    client = rig.run(rig.request(prompt=600, max_tokens=3000), 0)
    client.wait(TokenEvent)
    rig.engine.release(client.request).result(WAIT_S)
    assert cached(rig) >= 2
    rig.engine.stop(WAIT_S)


def test_one_token_of_a_staged_prompt_keeps_nothing_for_nothing_was_copied():
    rig = with_prefix(staging_pages=8)
    rig.run(rig.request(prompt=600, max_tokens=1), 0).wait(FinishedEvent)
    assert cached(rig) == 0
    rig.engine.stop(WAIT_S)
