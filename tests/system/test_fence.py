"""A fence over real Mooncake: what a writer had begun, and what it sends later, changes nothing any more."""

import socket
import struct
import threading
import time

import psutil
import pytest
import torch

from common.transfer.engine import EngineSettings, TransferEngine

pytestmark = pytest.mark.system
MIB = 1 << 20


def header(size: int, address: int) -> bytes:
    """Of a write in Mooncake's TCP protocol: size, address, opcode."""
    return struct.pack("<QQB7x", size, address, 1)


class Receiver:
    def __init__(self, memory: torch.Tensor) -> None:
        before = self._listening()
        self.engine = TransferEngine(EngineSettings())
        self.engine.register(memory.data_ptr(), memory.nbytes)
        (self.port,) = self._listening() - before - {int(self.engine.session.rpartition(":")[2])}

    def _listening(self) -> set[int]:
        connections = psutil.Process().net_connections("tcp")
        return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))


def wait_until_landed(memory: torch.Tensor, value: int, count: int) -> None:
    end = time.monotonic() + 5
    while int((memory == value).sum()) < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_unregistering_alone_lets_a_write_that_was_begun_go_on():
    # The fact that makes fencing necessary. Should Mooncake ever change it, this test says so.
    memory = torch.zeros(8 * MIB, dtype=torch.uint8)
    receiver = Receiver(memory)
    with receiver.connect() as writer:
        writer.sendall(header(2 * MIB, memory.data_ptr()) + b"\x07" * MIB)
        wait_until_landed(memory, 7, MIB)
        receiver.engine.close()
        writer.sendall(b"\x07" * MIB)
        wait_until_landed(memory, 7, 2 * MIB)
    assert receiver.engine.fence(5)


def test_after_a_fence_nothing_of_a_begun_write_lands_nor_of_a_new_one():
    memory = torch.zeros(8 * MIB, dtype=torch.uint8)
    receiver = Receiver(memory)
    with receiver.connect() as begun, receiver.connect() as idle:
        begun.sendall(header(2 * MIB, memory.data_ptr()) + b"\x07" * MIB)
        wait_until_landed(memory, 7, MIB)
        assert receiver.engine.fence(5)
        memory.zero_()
        for writer, first in (
            (begun, b""),
            (idle, header(MIB, memory.data_ptr())),
            (None, header(MIB, memory.data_ptr())),
        ):
            try:
                (writer or receiver.connect()).sendall(first + b"\x09" * MIB)
            except OSError:
                continue
        time.sleep(0.5)
    assert not memory.any()
    assert receiver.engine.fence(5), "a second fence is nothing new"


def test_writers_at_full_speed_are_cut_off_and_another_session_of_the_same_memory_goes_on():
    memory = torch.zeros(64 * MIB, dtype=torch.uint8)
    fenced, other = Receiver(memory), Receiver(memory)

    def write(receiver: Receiver, first: int, value: int) -> None:
        with receiver.connect() as writer:
            try:
                writer.sendall(header(16 * MIB, memory.data_ptr() + first))
                for _ in range(16 * 16):
                    writer.sendall(bytes([value]) * (MIB // 16))
                    time.sleep(0.002)
            except OSError:
                return

    threads = [threading.Thread(target=write, args=(fenced, i * 16 * MIB, 1)) for i in range(3)]
    threads.append(threading.Thread(target=write, args=(other, 48 * MIB, 2)))
    for thread in threads:
        thread.start()
    wait_until_landed(memory, 1, MIB)
    assert fenced.engine.fence(5)
    after = memory[: 48 * MIB].clone()
    for thread in threads:
        thread.join(20)
    assert torch.equal(memory[: 48 * MIB], after)
    wait_until_landed(memory, 2, 16 * MIB)
    assert other.engine.fence(5)


def test_a_fenced_session_keeps_its_ports():
    memory = torch.zeros(MIB, dtype=torch.uint8)
    receiver = Receiver(memory)
    assert receiver.engine.fence(5)
    with pytest.raises(OSError, match="in use"), socket.socket() as taken:
        taken.bind(("0.0.0.0", receiver.port))
