"""A plain TCP balancer, as one stands before routers: connections go in turn to those whose /ready says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import httpx

CHECK_S = 0.1


class Balancer:
    """Runs on a thread of its own between `start` and `stop`; `url` is its door."""

    def __init__(self, backends: Sequence[str]) -> None:
        self._backends = backends
        self._ready: list[str] = []
        self._turn = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.url = ""

    def start(self) -> Balancer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _start(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._check = self._loop.create_task(self._keep_checking())

    async def _stop(self) -> None:
        self._check.cancel()
        await asyncio.gather(self._check, return_exceptions=True)

    async def _keep_checking(self) -> None:
        async with httpx.AsyncClient(timeout=2, limits=httpx.Limits(max_keepalive_connections=0)) as client:
            while True:
                self._ready = [b for b in self._backends if await self._is_ready(client, b)]
                await asyncio.sleep(CHECK_S)

    async def _is_ready(self, client: httpx.AsyncClient, backend: str) -> bool:
        try:
            return (await client.get(f"http://{backend}/ready")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._turn += 1
        ready = self._ready or list(self._backends)
        for offset in range(len(ready)):
            host, _, port = ready[(self._turn + offset) % len(ready)].rpartition(":")
            try:
                to, out = await asyncio.open_connection(host, int(port))
                break
            except OSError:
                continue
        else:
            writer.close()
            return
        await asyncio.gather(_pipe(reader, out), _pipe(to, writer))


async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except OSError:
        pass
    finally:
        sink.close()
