"""GB/s of Mooncake over TCP on loopback against block size, batches and threads, next to a socket, memcpy and digests.

    python -m benchmarks.mooncake_throughput [--mebibytes 128] [--repeats 3]

All in one run: two processes for Mooncake and for the plain socket, one thread of memcpy. A block is one write; a batch
is how many are in flight at once in one thread. Each figure is the best of the repeats. The blocks of the first table
are scattered on both sides, so that nothing merges: 37 440 bytes is a C4 page.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from common.transfer.digest import digest_of
from common.transfer.engine import EngineSettings, TransferEngine

BLOCKS = (4096, 37440, 262_144, 1 << 20, 8 << 20)
BATCHES = (1, 4, 16, 64)
THREADS = (1, 2)
POLL_S = 0.00005


def receive(pipe: Connection, size: int) -> None:
    memory = torch.zeros(size, dtype=torch.uint8)
    engine = TransferEngine(EngineSettings())
    engine.register(memory.data_ptr(), size)
    server = socket.create_server(("127.0.0.1", 0))
    pipe.send((engine.session, memory.data_ptr(), server.getsockname()[1]))
    view = memoryview(memory.numpy())
    while True:
        connection, _ = server.accept()
        with connection:
            got = 0
            while got < size:
                count = connection.recv_into(view[got:], min(1 << 20, size - got))
                if count == 0:
                    return
                got += count
            connection.sendall(b"k")


def best(repeats: int, size: int, run: Callable[[], None]) -> float:
    """GB/s of the fastest of `repeats` runs over `size` bytes."""
    fastest = float("inf")
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - begun)
    return size / fastest / 1e9


def write(engine: TransferEngine, session: str, places: list[tuple[int, int]], block: int, batch: int) -> None:
    """Writes blocks (source, target) with at most `batch` in flight."""
    alive: list[int] = []
    for source, target in places:
        while len(alive) >= batch:
            alive = still_running(engine, alive)
        alive.append(engine.submit_write(session, source, target, block))
        if alive[-1] == 0:
            raise RuntimeError("a write was refused")
    while alive:
        alive = still_running(engine, alive)


def still_running(engine: TransferEngine, transfers: list[int]) -> list[int]:
    states = {transfer: engine.check(transfer) for transfer in transfers}
    if "failed" in states.values():
        raise RuntimeError("a write failed")
    left = [transfer for transfer, state in states.items() if state == "running"]
    if len(left) == len(transfers):
        time.sleep(POLL_S)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mebibytes", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    size = arguments.mebibytes << 20
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(theirs, size), daemon=True)
    receiver.start()
    session, base, port = ours.recv()
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8)
    engine = TransferEngine(EngineSettings())
    engine.register(memory.data_ptr(), size)

    def plain_socket() -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(memoryview(memory.numpy()))
            connection.recv(1)

    target = torch.zeros_like(memory)
    print(f"GB/s, {arguments.mebibytes} MiB, best of {arguments.repeats}")
    print(f"memcpy (1 thread)   {best(arguments.repeats, size, lambda: memory_copy(target, memory)):6.2f}")
    print(f"xxh3-128 (1 thread) {best(arguments.repeats, size, lambda: digest(memory)):6.2f}")
    print(f"plain TCP socket    {best(arguments.repeats, size, plain_socket):6.2f}")
    print(f"{'block bytes':>12}{'threads':>9}" + "".join(f"{f'batch {batch}':>10}" for batch in BATCHES))
    for block in BLOCKS:
        for threads in THREADS:
            figures: list[float] = []
            for batch in BATCHES:
                count = min(size // block, 4096)
                order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
                places = [(memory.data_ptr() + i * block, base + place * block) for i, place in enumerate(order)]
                shares = [places[i::threads] for i in range(threads)]

                def run(shares: list[list[tuple[int, int]]] = shares, block: int = block, batch: int = batch) -> None:
                    running = [
                        threading.Thread(target=write, args=(engine, session, share, block, batch)) for share in shares
                    ]
                    for thread in running:
                        thread.start()
                    for thread in running:
                        thread.join()

                run()
                figures.append(best(arguments.repeats, count * block, run))
            print(f"{block:>12}{threads:>9}" + "".join(f"{figure:>10.2f}" for figure in figures), flush=True)
    receiver.kill()


def digest(memory: torch.Tensor) -> None:
    """What each side does once with every byte when handovers are verified."""
    digest_of([(memory.data_ptr() + begin, 37440) for begin in range(0, memory.nbytes - 37440, 37440)])


def memory_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


if __name__ == "__main__":
    main()
