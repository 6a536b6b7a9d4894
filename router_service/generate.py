"""One choice of a completion: a Generate call on a decode worker, turned into pieces of text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from common.errors import ErrorReason, ServiceError
from common.model.tokenizer import Tokenizer
from common.rpc.errors import from_rpc_error
from common.rpc.gen.dsv4pd.v1 import common_pb2, decode_pb2
from common.rpc.request_scope import outgoing_metadata
from router_service.detokenise import IncrementalDetokeniser, StopFinder
from router_service.placement import HOST_PAGE_TOKENS
from router_service.silence import Silence
from router_service.trial import Trial, may_go_elsewhere
from router_service.workers import WorkerPool

_REASONS = {
    decode_pb2.FINISH_REASON_STOP: "stop",
    decode_pb2.FINISH_REASON_LENGTH: "length",
    decode_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True)
class Choice:
    """What one Generate call is asked for. `stop_ids` end the text and are not part of it; `trace_id` is the HTTP
    request's id, which several calls may share."""

    index: int
    request_id: str
    token_ids: list[int]
    sampling: common_pb2.SamplingParams
    stops: list[str]
    stop_ids: frozenset[int]
    skip_special_tokens: bool
    priority: int
    queue_timeout_s: float
    event_timeout_s: float
    trace_id: str


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


async def run_choice(
    choice: Choice, workers: WorkerPool, tokenizer: Tokenizer, on_dispatched: Callable[[], None]
) -> AsyncGenerator[Piece]:
    """Pieces until the choice is finished. Closing the iterator ends the request on the workers.

    Other workers are tried only when one could not be reached or refused before it began; `on_dispatched` is called
    when a worker has begun. Raises ServiceError.
    """
    async with workers.lanes.slot(choice.priority, choice.queue_timeout_s):
        no_decode: frozenset[str] = frozenset()
        no_prefill: frozenset[str] = frozenset()
        refusal: ServiceError | None = None
        while True:
            try:
                decode = workers.pick_decode(len(choice.token_ids) + choice.sampling.max_tokens, no_decode)
                prefill = workers.pick_prefill(choice.token_ids, no_prefill)
            except ServiceError:
                if refusal is not None:
                    raise refusal from None
                raise
            trial = Trial(decode, prefill)
            events = _events(choice, trial, attempt=len(no_decode) + len(no_prefill))
            shown = False
            try:
                first = await anext(events, None)
                if first is None:
                    raise ServiceError(ErrorReason.INTERNAL, "the decode service ended its stream without an event")
                trial.reserved = True
                on_dispatched()
                async for piece in pieces_of(choice, first, events, tokenizer):
                    shown = True
                    yield piece
                trial.succeeded()
                return
            except ServiceError as error:
                trial.failed(error)
                if shown or not may_go_elsewhere(error, reserved=trial.reserved):
                    raise
                # Decode's own refusals come before it reserves memory: a later one is prefill's.
                if trial.reserved:
                    no_prefill |= {prefill.address}
                else:
                    no_decode |= {decode.address}
                # The last worker's answer is the client's, unless that was absent like all others.
                if trial.reserved or error.reason is ErrorReason.QUEUE_FULL:
                    refusal = error
            finally:
                trial.end()
                await events.aclose()


async def _events(choice: Choice, trial: Trial, attempt: int) -> AsyncGenerator[decode_pb2.GenerateEvent]:
    """The call's events, with both workers' outstanding work counted while it lasts."""
    decode, prefill = trial.decode, trial.prefill
    pages = -(-(len(choice.token_ids) + choice.sampling.max_tokens) // HOST_PAGE_TOKENS)
    decode.outstanding += pages
    prefill.outstanding += len(choice.token_ids)
    decode.requests += 1
    prefill.requests += 1
    call = decode.decode.Generate(
        decode_pb2.GenerateRequest(
            # Another name for another attempt: the first one's memory may not be given back yet.
            request_id=f"{choice.request_id}-r{attempt}" if attempt else choice.request_id,
            prefill_address=prefill.address,
            token_ids=choice.token_ids,
            sampling=choice.sampling,
            queue_timeout_s=choice.queue_timeout_s,
            priority=choice.priority,
        ),
        metadata=outgoing_metadata(choice.trace_id, trial.span),
    )
    silence = Silence(call, choice.event_timeout_s)
    try:
        async for event in call:
            silence.heard()
            yield event
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, ErrorReason.DECODE_UNAVAILABLE) from None
    except asyncio.CancelledError:
        if not silence.cut:
            raise
        raise ServiceError(
            ErrorReason.DEADLINE_EXCEEDED,
            f"decode worker {decode.address} said nothing for {choice.event_timeout_s:g} s",
        ) from None
    finally:
        silence.end()
        call.cancel()
        decode.requests -= 1
        prefill.requests -= 1


async def pieces_of(
    choice: Choice,
    first: decode_pb2.GenerateEvent,
    events: AsyncIterator[decode_pb2.GenerateEvent],
    tokenizer: Tokenizer,
) -> AsyncGenerator[Piece]:
    """The text of a call's events, `first` and those behind it, and how it ended. Raises ServiceError."""
    text = _Text(choice, tokenizer)
    piece = text.take(first)
    if piece is not None:
        yield piece
    if not text.is_over:
        async for event in events:
            piece = text.take(event)
            if piece is not None:
                yield piece
            if text.is_over:
                break
    if not text.is_over:
        raise ServiceError(ErrorReason.INTERNAL, "the decode service ended its stream without a result")


class _Text:
    """A choice's text as its events come; `is_over` after a stop string or the last event."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer) -> None:
        self.is_over = False
        self._choice = choice
        self._detokeniser = IncrementalDetokeniser(tokenizer, skip_special_tokens=choice.skip_special_tokens)
        self._finder = StopFinder(choice.stops)
        self._made = 0
        self._min_tokens = choice.sampling.min_tokens

    def take(self, event: decode_pb2.GenerateEvent) -> Piece | None:
        """The piece that the event is. Raises ServiceError when its log probabilities are not those asked for, or its
        finish reason is unknown."""
        kind = event.WhichOneof("event")
        if kind == "tokens":
            return self._tokens(event.tokens)
        if kind == "finished":
            self.is_over = True
            shown, stopped = self._finder.push(self._detokeniser.finish())
            reason = "stop" if stopped else _finish_reason(event.finished)
            rest = "" if stopped else self._finder.finish()
            cached = event.finished.cached_tokens
            return Piece(self._choice.index, shown + rest, finish_reason=reason, cached_tokens=cached)
        return None

    def _tokens(self, tokens: decode_pb2.Tokens) -> Piece:
        choice = self._choice
        _check_logprobs(choice, tokens, first=self._made == 0)
        text = ""
        stopped = False
        token_ids: list[int] = []
        for token in tokens.token_ids:
            token_ids.append(token)
            self._made += 1
            if token in choice.stop_ids and self._made >= self._min_tokens:
                continue  # it ends the text and is no part of it
            shown, stopped = self._finder.push(self._detokeniser.push(token))
            text += shown
            if stopped:
                break
        self.is_over = stopped
        return Piece(
            choice.index,
            text,
            token_ids,
            list(tokens.logprobs[: len(token_ids)]),
            list(tokens.prompt_logprobs),
            "stop" if stopped else None,
        )


def _finish_reason(finished: decode_pb2.Finished) -> str:
    """In OpenAI's words. Raises ServiceError for one that this build does not know."""
    reason = _REASONS.get(finished.reason)
    if reason is None:
        raise ServiceError(
            ErrorReason.INTERNAL,
            f"the decode service ended with the unknown finish reason {finished.reason}",
            field="finish_reason",
            ours=", ".join(_REASONS.values()),
            theirs=finished.reason,
        )
    return reason


def _check_logprobs(choice: Choice, tokens: decode_pb2.Tokens, *, first: bool) -> None:
    """Raises ServiceError unless there are as many log probabilities as were asked for."""
    wanted = len(tokens.token_ids) if choice.sampling.HasField("logprobs") else 0
    wanted_prompt = len(choice.token_ids) - 1 if first and choice.sampling.HasField("prompt_logprobs") else 0
    for name, found, due in (
        ("logprobs", len(tokens.logprobs), wanted),
        ("prompt_logprobs", len(tokens.prompt_logprobs), wanted_prompt),
    ):
        if found != due:
            raise ServiceError(
                ErrorReason.INTERNAL,
                f"the decode service sent {found} {name}, not {due}",
                field=name,
                ours=due,
                theirs=found,
            )
