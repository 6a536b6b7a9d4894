"""From a checked body to choices, and from their pieces to an answer or a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import structlog

from common.errors import ErrorReason, ServiceError
from common.model.config import ModelConfig
from common.model.tokenizer import Tokenizer
from common.rpc.gen.dsv4pd.v1 import common_pb2
from router_service import errors
from router_service.answers import Answers
from router_service.generate import Choice, Piece, run_choice
from router_service.generation import Generation
from router_service.metrics import RouterMetrics
from router_service.settings import RouterSettings
from router_service.workers import WorkerPool

QUEUED_PIECES = 64
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class Completion:
    """One request. Use `pieces` once; closing it ends every choice on the workers."""

    def __init__(
        self,
        generation: Generation,
        answers: Answers,
        config: ModelConfig,
        tokenizer: Tokenizer,
        workers: WorkerPool,
        metrics: RouterMetrics,
        settings: RouterSettings,
        request_id: str,
    ) -> None:
        """`request_id` is the HTTP request's."""
        self.id = generation.id
        self.dispatched = False
        self._generation = generation
        self._answers = answers
        self._config = config
        self._tokenizer = tokenizer
        self._workers = workers
        self._metrics = metrics
        self._settings = settings
        self._request_id = request_id
        self.choices = self._choices()

    def _was_dispatched(self) -> None:
        self.dispatched = True

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Pieces of all choices as they come. Raises ServiceError; then the other choices are ended too."""
        self._metrics.prompt_tokens.inc(sum(len(tokens) for tokens in self._generation.prompts))
        begun = time.monotonic()
        last: dict[int, float] = {}
        # One choice needs no queue between it and its reader: at thousands of tokens a second that shows.
        source = self._choice_pieces(self.choices[0]) if len(self.choices) == 1 else self._merged()
        async with aclosing(source) as pieces:
            async for piece in pieces:
                now = time.monotonic()
                if piece.token_ids:
                    seconds = self._metrics.between_tokens if piece.index in last else self._metrics.first_token
                    seconds.observe(now - last.get(piece.index, begun))
                    self._metrics.output_tokens.inc(len(piece.token_ids))
                    last[piece.index] = now
                yield piece

    async def _choice_pieces(self, choice: Choice) -> AsyncGenerator[Piece]:
        """One choice's pieces; whatever goes wrong is a ServiceError."""
        running = run_choice(choice, self._workers, self._tokenizer, self._was_dispatched)
        try:
            async with aclosing(running) as pieces:
                async for piece in pieces:
                    yield piece
        except ServiceError:
            raise
        except Exception as error:  # noqa: BLE001 - the request must end, whatever it was
            structlog.get_logger().exception("a choice failed")
            raise ServiceError(ErrorReason.INTERNAL, f"router: {error!r}") from None

    async def _merged(self) -> AsyncGenerator[Piece]:
        arrived: asyncio.Queue[Piece | ServiceError | None] = asyncio.Queue(QUEUED_PIECES)

        async def follow(choice: Choice) -> None:
            try:
                async with aclosing(self._choice_pieces(choice)) as pieces:
                    async for piece in pieces:
                        await arrived.put(piece)
            except ServiceError as error:
                await arrived.put(error)
            await arrived.put(None)

        tasks = [asyncio.create_task(follow(choice)) for choice in self.choices]
        left = len(tasks)
        try:
            while left:
                item = await arrived.get()
                if item is None:
                    left -= 1
                elif isinstance(item, ServiceError):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream. Raises ServiceError."""
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                self._answers.add(piece)
        return self._answers.whole()

    async def events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """Server-sent events of a streaming request: chunks, usage if asked for, [DONE]."""
        piece: Piece | None = first
        try:
            while piece is not None:
                yield _event(self._answers.chunk(piece))
                piece = await anext(pieces, None)
            if self._answers.wants_usage:
                yield _event(self._answers.usage_chunk())
        except ServiceError as error:
            self.failed(error)
            yield _event(errors.body(errors.from_service_error(error, dispatched=True)))
        yield "data: [DONE]\n\n"

    def failed(self, error: ServiceError) -> None:
        """Counts and logs the error that ended the request."""
        self._metrics.failures.labels(error.reason.name.lower()).inc()
        structlog.get_logger().warning(
            "completion failed", completion=self.id, reason=error.reason.name, detail=error.message
        )

    def _choices(self) -> list[Choice]:
        request = self._generation.request
        eos = frozenset() if request.ignore_eos else frozenset(self._config.eos_token_id)
        found: list[Choice] = []
        for tokens in self._generation.prompts:
            for number in range(request.n or 1):
                found.append(
                    Choice(
                        index=len(found),
                        request_id=f"{self.id}-{len(found)}",
                        token_ids=tokens,
                        sampling=self._sampling(number),
                        stops=request.stops,
                        stop_ids=eos | frozenset(request.stop_token_ids or ()),
                        skip_special_tokens=request.skip_special_tokens,
                        priority=request.priority,
                        queue_timeout_s=self._settings.queue_timeout_s,
                        event_timeout_s=self._settings.event_timeout_s,
                        trace_id=self._request_id,
                    )
                )
        return found

    def _sampling(self, number: int) -> common_pb2.SamplingParams:
        """For the number-th choice of a prompt: choices must differ, so each has a seed of its own."""
        generation, request = self._generation, self._generation.request
        seed = None if request.seed is None else (request.seed + number) % 2**64
        return common_pb2.SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=request.top_p or 1.0,
            top_k=max(request.top_k or 0, 0),
            min_p=request.min_p or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            seed=seed,
            logit_bias=request.biases(self._config.vocab_size),
            logprobs=generation.logprobs,
            max_tokens=generation.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=request.stop_token_ids or [],
            ignore_eos=request.ignore_eos,
            prompt_logprobs=generation.prompt_logprobs,
        )


def _event(content: dict[str, Any]) -> str:
    return f"data: {_JSON.encode(content)}\n\n"
