"""One choice of a completion: a Generate call on a decode worker, turned into pieces of text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import grpc.aio

from common.errors import ErrorReason, ServiceError
from common.model.tokenizer import Tokenizer
from common.rpc.errors import from_rpc_error
from common.rpc.gen.dsv4pd.v1 import common_pb2, decode_pb2
from router_service.detokenise import IncrementalDetokeniser, StopFinder
from router_service.workers import Worker, WorkerPool

HOST_PAGE_TOKENS = 256
_REASONS = {
    decode_pb2.FINISH_REASON_STOP: "stop",
    decode_pb2.FINISH_REASON_LENGTH: "length",
    decode_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True)
class Choice:
    """What one Generate call is asked for. `stop_ids` end the text and are not part of it."""

    index: int
    request_id: str
    token_ids: list[int]
    sampling: common_pb2.SamplingParams
    stops: list[str]
    stop_ids: frozenset[int]
    skip_special_tokens: bool
    priority: int
    queue_timeout_s: float


@dataclass(frozen=True)
class Piece:
    """Tokens of a choice and the text they complete; `finish_reason` in the last piece, which may be empty."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=lambda: list[int]())
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=lambda: list[common_pb2.TokenLogprobs]())
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=lambda: list[common_pb2.TokenLogprobs]())
    finish_reason: str | None = None
    cached_tokens: int = 0


async def run_choice(choice: Choice, workers: WorkerPool, tokenizer: Tokenizer) -> AsyncGenerator[Piece]:
    """Pieces until the choice is finished. Closing the iterator ends the request on the workers.

    Another worker is tried only when the first could not be reached or refused as it drains, that is before
    anything was dispatched. Raises ServiceError.
    """
    tried: frozenset[str] = frozenset()
    while True:
        decode, prefill = workers.pick_decode(tried), workers.pick_prefill()
        events = _events(choice, decode, prefill)
        try:
            first = await anext(events)
        except ServiceError as error:
            await events.aclose()
            if error.reason not in (ErrorReason.DECODE_UNAVAILABLE, ErrorReason.DRAINING):
                if error.reason is ErrorReason.PREFILL_UNAVAILABLE:
                    workers.failed(prefill, error.message)
                raise
            workers.failed(decode, error.message)
            tried |= {decode.address}
            continue
        try:
            async for piece in _pieces(choice, first, events, tokenizer):
                yield piece
        except ServiceError as error:
            if error.reason is ErrorReason.PREFILL_UNAVAILABLE:
                workers.failed(prefill, error.message)
            raise
        finally:
            await events.aclose()
        return


async def _events(choice: Choice, decode: Worker, prefill: Worker) -> AsyncGenerator[decode_pb2.GenerateEvent]:
    """The call's events, with both workers' outstanding work counted while it lasts."""
    pages = -(-(len(choice.token_ids) + choice.sampling.max_tokens) // HOST_PAGE_TOKENS)
    decode.outstanding += pages
    prefill.outstanding += len(choice.token_ids)
    decode.requests += 1
    prefill.requests += 1
    call = decode.decode.Generate(
        decode_pb2.GenerateRequest(
            request_id=choice.request_id,
            prefill_address=prefill.address,
            token_ids=choice.token_ids,
            sampling=choice.sampling,
            queue_timeout_s=choice.queue_timeout_s,
            priority=choice.priority,
        ),
        metadata=(("x-request-id", choice.request_id),),
    )
    try:
        async for event in call:
            yield event
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, ErrorReason.DECODE_UNAVAILABLE) from None
    finally:
        call.cancel()
        decode.requests -= 1
        prefill.requests -= 1


async def _pieces(
    choice: Choice,
    first: decode_pb2.GenerateEvent,
    events: AsyncIterator[decode_pb2.GenerateEvent],
    tokenizer: Tokenizer,
) -> AsyncGenerator[Piece]:
    detokeniser = IncrementalDetokeniser(tokenizer, skip_special_tokens=choice.skip_special_tokens)
    finder = StopFinder(choice.stops)
    made = 0
    event: decode_pb2.GenerateEvent | None = first
    while event is not None:
        if event.HasField("tokens"):
            tokens = event.tokens
            text = ""
            stopped = False
            used = 0
            for token in tokens.token_ids:
                used += 1
                made += 1
                if token in choice.stop_ids and made >= choice.sampling.min_tokens:
                    continue  # it ends the text and is no part of it
                shown, stopped = finder.push(detokeniser.push(token))
                text += shown
                if stopped:
                    break
            yield Piece(
                choice.index,
                text,
                list(tokens.token_ids[:used]),
                list(tokens.logprobs[:used]),
                list(tokens.prompt_logprobs),
                "stop" if stopped else None,
            )
            if stopped:
                return
        elif event.HasField("finished"):
            shown, stopped = finder.push(detokeniser.finish())
            reason = "stop" if stopped else _REASONS[event.finished.reason]
            rest = "" if stopped else finder.finish()
            yield Piece(choice.index, shown + rest, finish_reason=reason, cached_tokens=event.finished.cached_tokens)
            return
        event = None
        with suppress(StopAsyncIteration):
            event = await anext(events)
    raise ServiceError(ErrorReason.INTERNAL, "the decode service ended its stream without a result")
