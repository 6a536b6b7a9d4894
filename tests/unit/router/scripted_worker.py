"""A worker over real gRPC that says what a test tells it to: for the router's behaviour, not for the model's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from common.errors import ServiceError
from common.rpc.channels import make_server
from common.rpc.errors import abort
from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc, common_pb2, decode_pb2, decode_pb2_grpc

Event = decode_pb2.GenerateEvent
Script = Callable[[decode_pb2.GenerateRequest], AsyncIterator[Event]]
OFFSET = 4  # of bytes in the byte tokenizer of the small configuration


def reserved() -> Event:
    return Event(reserved=decode_pb2.Reserved(host_pages=1, logical_pages=1))


def tokens(token_ids: list[int], *, logprobs: bool = False, prompt: list[int] | None = None) -> Event:
    """Every token has the log probability -id / 100; its only alternative is itself."""

    def made(ids: list[int]) -> list[common_pb2.TokenLogprobs]:
        each = [common_pb2.TokenLogprob(token_id=i, logprob=-i / 100) for i in ids]
        return [common_pb2.TokenLogprobs(chosen=one, top=[one]) for one in each]

    return Event(
        tokens=decode_pb2.Tokens(
            token_ids=token_ids, logprobs=made(token_ids) if logprobs else [], prompt_logprobs=made((prompt or [])[1:])
        )
    )


def finished(reason: int = decode_pb2.FINISH_REASON_LENGTH, **facts: Any) -> Event:
    return Event(finished=decode_pb2.Finished(reason=reason, **facts))  # type: ignore[arg-type]


def saying(text: str | bytes, *, per_event: int = 1, reason: int = decode_pb2.FINISH_REASON_LENGTH) -> Script:
    """Answers with the text, `per_event` bytes at a time, with log probabilities when they were asked for."""
    content = text.encode() if isinstance(text, str) else text
    ids = [byte + OFFSET for byte in content]

    async def script(request: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        yield reserved()
        wants = request.sampling.HasField("logprobs")
        prompt = list(request.token_ids) if request.sampling.HasField("prompt_logprobs") else None
        for start in range(0, len(ids), per_event):
            yield tokens(ids[start : start + per_event], logprobs=wants, prompt=prompt if start == 0 else None)
        yield finished(reason)

    return script


def failing(error: ServiceError, after: tuple[Event, ...] = ()) -> Script:
    async def script(_: decode_pb2.GenerateRequest) -> AsyncIterator[Event]:
        for event in after:
            yield event
        raise error

    return script


class ScriptedWorker(decode_pb2_grpc.DecodeServicer, admin_pb2_grpc.AdminServicer):
    """Answers Generate with `script` and GetStatus with `status`; records what it was asked and what was cancelled."""

    def __init__(self, script: Script | None = None, *, free_pages: int = 100, queued_tokens: int = 0) -> None:
        self.script = script or saying("ok")
        self.status = admin_pb2.GetStatusReply(
            ready=True,
            max_context_tokens=4096,
            pools=[admin_pb2.PoolStatus(name="host_c4", total=100, free=free_pages)],
            phases=[admin_pb2.PhaseCount(phase="queued", requests=1, tokens=queued_tokens)],
        )
        self.requests: list[decode_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.running = 0
        self.cancelled = 0
        self.address = ""
        self._server: Any = None

    async def start(self, port: int = 0) -> ScriptedWorker:
        self._server = make_server()
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()
        return self

    async def stop(self) -> None:
        await self._server.stop(None)

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Any) -> admin_pb2.GetStatusReply:
        return self.status

    async def Generate(self, request: decode_pb2.GenerateRequest, context: Any) -> AsyncIterator[Event]:
        self.requests.append(request)
        self.metadata.append({str(k): str(v) for k, v in context.invocation_metadata() or ()})
        self.running += 1
        try:
            async for event in self.script(request):
                yield event
        except ServiceError as error:
            await abort(context, error)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
