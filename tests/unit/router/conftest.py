"""The router's HTTP application served by uvicorn in the test's own loop, over scripted workers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from common.model.tokenizer import ByteTokenizer
from router_service.app import RouterState, make_app
from router_service.settings import RouterSettings
from tests.unit.router.chat_tokenizer import chat_config, chat_tokenizer
from tests.unit.router.scripted_worker import ScriptedWorker


class Router:
    """A served router with its workers and a client."""

    def __init__(self, state: RouterState, app: FastAPI, url: str, client: httpx.AsyncClient) -> None:
        self.state = state
        self.app = app
        self.url = url
        self.client = client

    async def chat(self, *contents: str, **body: Any) -> httpx.Response:
        """A chat request; the contents are the user's and the assistant's in turn."""
        roles = ("user", "assistant") * len(contents)
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        return await self.client.post("/v1/chat/completions", json={"messages": messages} | body)

    async def post(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def events(self, **body: Any) -> list[Any]:
        """The decoded events of a stream, [DONE] checked and left out; every byte belongs to one of them."""
        return _events(await self.post(stream=True, **body))

    async def chat_events(self, *contents: str, **body: Any) -> list[Any]:
        return _events(await self.chat(*contents, stream=True, **body))

    async def metric(self, line: str) -> float:
        for found in (await self.client.get("/metrics")).text.splitlines():
            if found.startswith(f"{line} "):
                return float(found.rpartition(" ")[2])
        raise AssertionError(f"no metric {line}")


def _events(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = answer.content.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


ServeRouter = Callable[..., Awaitable[Router]]


@asynccontextmanager
async def serving(
    prefill: list[ScriptedWorker], decode: list[ScriptedWorker], chat_tokens: bool = False, **flags: Any
) -> AsyncIterator[Router]:
    config = chat_config() if chat_tokens else ModelConfig.from_dict(small_config())
    tokenizer = chat_tokenizer() if chat_tokens else ByteTokenizer(config)
    settings = RouterSettings(
        **{
            "model": Path("/nowhere/scripted"),
            "prefill": ",".join(worker.address for worker in prefill),
            "decode": ",".join(worker.address for worker in decode),
            "poll_interval_s": 0.05,
            "poll_timeout_s": 1.0,
            **flags,
        }
    )
    state = RouterState(settings, config, tokenizer)
    app = make_app(state)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=1))
    served = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield Router(state, app, url, client)
    server.should_exit = True
    await served


@pytest.fixture
async def serve_router() -> AsyncIterator[ServeRouter]:
    """serve_router(decode=[...], prefill=[...], **settings): workers not started yet are started. With chat_tokens
    the tokenizer has DeepSeek-V4's control tokens."""
    async with AsyncExitStack() as stack:

        async def serve(
            decode: list[ScriptedWorker] | None = None,
            prefill: list[ScriptedWorker] | None = None,
            chat_tokens: bool = False,
            **flags: Any,
        ) -> Router:
            decode, prefill = decode or [ScriptedWorker()], prefill or [ScriptedWorker()]
            for worker in [*decode, *prefill]:
                if not worker.address:
                    await worker.start()
                    stack.push_async_callback(worker.stop)
            return await stack.enter_async_context(serving(prefill, decode, chat_tokens, **flags))

        yield serve


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Returns once the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
