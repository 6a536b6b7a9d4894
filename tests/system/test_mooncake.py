"""The sender over real Mooncake between two processes: bytes arrive, failures are typed, drained means drained."""

import multiprocessing as mp
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.errors import ErrorReason, ServiceError
from common.transfer.engine import EngineSettings, TransferEngine
from common.transfer.plan import Run
from common.transfer.sender import SenderSettings, TransferSender

pytestmark = pytest.mark.system
SIZE = 8 << 20
PAGE = 37440


def _receive(commands: Any, answers: Any) -> None:
    memory = torch.zeros(SIZE, dtype=torch.uint8)
    engine = TransferEngine(EngineSettings())
    engine.register(memory.data_ptr(), SIZE)
    answers.put((engine.session, memory.data_ptr()))
    while (command := commands.get()) != "stop":
        begin, size = command
        answers.put(memory[begin : begin + size].numpy().tobytes())
    engine.close()


class Receiver:
    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._commands, self._answers = context.Queue(), context.Queue()
        self.process = context.Process(target=_receive, args=(self._commands, self._answers), daemon=True)
        self.process.start()
        self.session, self.base = self._answers.get(timeout=60)

    def read(self, begin: int, size: int) -> bytes:
        self._commands.put((begin, size))
        return self._answers.get(timeout=20)

    def stop(self) -> None:
        self._commands.put("stop")
        self.process.join(10)


@pytest.fixture(scope="module")
def source() -> Iterator[tuple[TransferEngine, torch.Tensor]]:
    memory = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    engine = TransferEngine(EngineSettings(transfer_timeout_s=5))
    engine.register(memory.data_ptr(), SIZE)
    yield engine, memory
    engine.close()


def runs_of(memory: torch.Tensor, receiver: Receiver, places: list[int]) -> list[Run]:
    return [Run(memory.data_ptr() + i * PAGE, receiver.base + place * PAGE, PAGE) for i, place in enumerate(places)]


def test_shuffled_pages_arrive_at_their_places_and_nowhere_else(source):
    engine, memory = source
    receiver, sender = Receiver(), TransferSender(engine)
    places = torch.randperm(100, generator=torch.Generator().manual_seed(1))[:60].tolist()
    post = sender.post("a", receiver.session, runs_of(memory, receiver, places), 20)
    receipt = post.done.result(20)
    assert receipt.size == 60 * PAGE
    assert receipt.posted_unix_ns < receipt.landed_unix_ns
    post.drained.result(5)
    for index, place in enumerate(places):
        assert receiver.read(place * PAGE, PAGE) == memory[index * PAGE : (index + 1) * PAGE].numpy().tobytes()
    untouched = next(place for place in range(100) if place not in places)
    assert receiver.read(untouched * PAGE, PAGE) == bytes(PAGE)
    assert sender.undrained() == 0
    receiver.stop()
    assert sender.close(5)


def test_a_dead_receiver_is_a_typed_error_and_the_next_receiver_is_served(source):
    engine, memory = source
    failures: list[str] = []
    receiver, sender = Receiver(), TransferSender(engine, on_failure=failures.append)
    receiver.process.kill()
    receiver.process.join(5)
    begun = time.monotonic()
    post = sender.post("a", receiver.session, runs_of(memory, receiver, [0, 1]), 20)
    error = post.done.exception(10)
    assert isinstance(error, ServiceError)
    assert error.reason is ErrorReason.TRANSFER_FAILED
    assert receiver.session in error.message
    assert time.monotonic() - begun < 2
    post.drained.result(10)
    assert failures == ["transfer_failed"]
    other = Receiver()
    sender.post("b", other.session, runs_of(memory, other, [3]), 20).done.result(20)
    assert other.read(3 * PAGE, 16) == memory[:16].numpy().tobytes()
    other.stop()


def test_a_receiver_killed_mid_transfer_fails_the_post_and_drains(source):
    engine, memory = source
    receiver = Receiver()
    sender = TransferSender(engine, SenderSettings(max_run_bytes=1024, max_batch_runs=1))
    post = sender.post("a", receiver.session, runs_of(memory, receiver, list(range(200))), 60)
    time.sleep(0.1)
    assert not post.done.done()
    receiver.process.kill()
    assert isinstance(post.done.exception(10), ServiceError)
    post.drained.result(10)
    assert sender.cancel("a").done()


def test_an_unregistered_target_is_no_success(source):
    engine, memory = source
    receiver, sender = Receiver(), TransferSender(engine)
    post = sender.post("a", receiver.session, [Run(memory.data_ptr(), receiver.base + SIZE + (1 << 30), PAGE)], 10)
    assert isinstance(post.done.exception(20), ServiceError)
    post.drained.result(20)
    receiver.stop()


def test_an_unregistered_source_is_refused_before_anything_is_sent(source):
    engine, memory = source
    stray = torch.zeros(PAGE, dtype=torch.uint8)
    sender = TransferSender(engine)
    with pytest.raises(ValueError, match="not inside registered memory"):
        sender.post("a", "127.0.0.1:1", [Run(stray.data_ptr(), 0, PAGE)], 1)
    with pytest.raises(ValueError, match="not inside registered memory"):
        sender.post("a", "127.0.0.1:1", [Run(memory.data_ptr() + SIZE - 1, 0, 2)], 1)
    assert sender.undrained() == 0


def test_cancel_stops_posting_and_resolves_only_when_nothing_is_in_flight(source):
    engine, memory = source
    receiver = Receiver()
    sender = TransferSender(engine, SenderSettings(max_run_bytes=1024, max_batch_runs=1))
    first = sender.post("a", receiver.session, runs_of(memory, receiver, list(range(100))), 60)
    second = sender.post("a", receiver.session, runs_of(memory, receiver, list(range(100))), 60)
    time.sleep(0.05)
    drained = sender.cancel("a")
    drained.result(5)
    assert first.drained.done()
    assert second.drained.done()
    error = second.done.exception()
    assert isinstance(error, ServiceError)
    assert error.reason is ErrorReason.CANCELLED
    assert receiver.read(99 * PAGE, PAGE) == bytes(PAGE)
    with pytest.raises(ServiceError, match="is cancelled"):
        sender.post("a", receiver.session, runs_of(memory, receiver, [0]), 1)
    sender.forget("a")
    sender.post("a", receiver.session, runs_of(memory, receiver, [0]), 10).done.result(10)
    receiver.stop()
