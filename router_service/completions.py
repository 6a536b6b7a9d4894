"""POST /v1/completions: from a checked body to choices, and from their pieces to OpenAI's objects."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import structlog

from common.errors import ErrorReason, ServiceError
from common.model.config import ModelConfig
from common.model.tokenizer import Tokenizer, decode
from common.rpc.gen.dsv4pd.v1 import common_pb2
from router_service import errors
from router_service.errors import HTTPError, bad_request
from router_service.generate import Choice, Piece, run_choice
from router_service.metrics import RouterMetrics
from router_service.protocol import CompletionRequest, prompts_of
from router_service.workers import WorkerPool

DEFAULT_MAX_TOKENS = 16
QUEUED_PIECES = 64


@dataclass
class _Gathered:
    """A choice as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=lambda: list[int]())
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=lambda: list[common_pb2.TokenLogprobs]())
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=lambda: list[common_pb2.TokenLogprobs]())
    finish_reason: str | None = None
    cached_tokens: int = 0

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.prompt_logprobs += piece.prompt_logprobs
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)


class Completion:
    """One request. Use `pieces` once; closing it ends every choice on the workers."""

    def __init__(
        self,
        request: CompletionRequest,
        config: ModelConfig,
        tokenizer: Tokenizer,
        workers: WorkerPool,
        metrics: RouterMetrics,
        model_name: str,
        queue_timeout_s: float,
    ) -> None:
        """Raises HTTPError 400 for what the client did wrong."""
        request.check(config.vocab_size)
        self.id = f"cmpl-{secrets.token_hex(16)}"
        self._request = request
        self._config = config
        self._tokenizer = tokenizer
        self._workers = workers
        self._metrics = metrics
        self._model_name = model_name
        self._created = int(time.time())
        self._prompts = [self._tokens(prompt) for prompt in prompts_of(request)]
        self._texts = prompts_of(request)
        context = workers.max_context_tokens or config.max_positions
        for tokens in self._prompts:
            self._check_prompt(tokens, context)
        self.choices = self._choices(queue_timeout_s)

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Pieces of all choices as they come. Raises ServiceError; then the other choices are ended too."""
        arrived: asyncio.Queue[Piece | ServiceError | None] = asyncio.Queue(QUEUED_PIECES)

        async def follow(choice: Choice) -> None:
            try:
                async with aclosing(run_choice(choice, self._workers, self._tokenizer)) as pieces:
                    async for piece in pieces:
                        await arrived.put(piece)
            except ServiceError as error:
                await arrived.put(error)
            except Exception as error:  # noqa: BLE001 - the request must end, whatever it was
                structlog.get_logger().exception("a choice failed")
                await arrived.put(ServiceError(ErrorReason.INTERNAL, f"router: {error!r}"))
            await arrived.put(None)

        tasks = [asyncio.create_task(follow(choice)) for choice in self.choices]
        left = len(tasks)
        begun = last = time.monotonic()
        first = True
        try:
            while left:
                item = await arrived.get()
                if item is None:
                    left -= 1
                    continue
                if isinstance(item, ServiceError):
                    raise item
                now = time.monotonic()
                if item.token_ids:
                    (self._metrics.first_token if first else self._metrics.between_tokens).observe(
                        now - (begun if first else last)
                    )
                    self._metrics.output_tokens.inc(len(item.token_ids))
                    first, last = False, now
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream. Raises ServiceError."""
        gathered = [_Gathered() for _ in self.choices]
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                gathered[piece.index].add(piece)
        return self._object([self._choice_object(i, made) for i, made in enumerate(gathered)]) | {
            "usage": self._usage(gathered)
        }

    async def events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """Server-sent events of a streaming request: chunks, usage if asked for, [DONE]."""
        gathered = [_Gathered() for _ in self.choices]
        options = self._request.stream_options
        wants_usage = options is not None and options.include_usage
        piece: Piece | None = first
        try:
            while piece is not None:
                made = gathered[piece.index]
                offset, begun = len(made.text), bool(made.token_ids)
                made.add(piece)
                chunk = self._object([self._chunk_object(piece, offset, begun)])
                if wants_usage:
                    together = self._usage(gathered) if options and options.continuous_usage_stats else None
                    chunk["usage"] = together
                yield _event(chunk)
                piece = await anext(pieces, None)
            if wants_usage:
                yield _event(self._object([]) | {"usage": self._usage(gathered)})
        except ServiceError as error:
            failure = errors.from_service_error(error)
            self._metrics.failures.labels(error.reason.name.lower()).inc()
            yield _event(errors.body(failure))
        yield "data: [DONE]\n\n"

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _check_prompt(self, tokens: Sequence[int], context: int) -> None:
        if not tokens:
            raise bad_request("prompt is empty", "prompt", "empty_prompt")
        if max(tokens) >= self._config.vocab_size:
            raise bad_request(
                f"prompt: token id {max(tokens)} is not in the vocabulary of {self._config.vocab_size}", "prompt"
            )
        output = self._request.max_tokens or DEFAULT_MAX_TOKENS
        if len(tokens) + output > context:
            raise HTTPError(
                400,
                f"this model's context is {context} tokens, but prompt ({len(tokens)} tokens) and max_tokens "
                f"({output}) together are more",
                "prompt" if len(tokens) >= context else "max_tokens",
                "context_length_exceeded",
            )

    def _choices(self, queue_timeout_s: float) -> list[Choice]:
        request = self._request
        eos = frozenset() if request.ignore_eos else frozenset(self._config.eos_token_id)
        found: list[Choice] = []
        for tokens in self._prompts:
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
                        queue_timeout_s=queue_timeout_s,
                    )
                )
        return found

    def _sampling(self, number: int) -> common_pb2.SamplingParams:
        """For the number-th choice of a prompt: choices must differ, so each has a seed of its own."""
        request = self._request
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
            logprobs=request.logprobs,
            max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
            min_tokens=request.min_tokens,
            stop_token_ids=request.stop_token_ids or [],
            ignore_eos=request.ignore_eos,
            prompt_logprobs=request.logprobs if request.echo and request.logprobs is not None else None,
        )

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model_name,
            "choices": choices,
        }

    def _prompt_text(self, index: int) -> str:
        place = index // (self._request.n or 1)
        text = self._texts[place]
        return text if isinstance(text, str) else decode(self._tokenizer, self._prompts[place])

    def _choice_object(self, index: int, made: _Gathered) -> dict[str, Any]:
        request = self._request
        prefix = self._prompt_text(index) if request.echo else ""
        found: dict[str, Any] = {
            "index": index,
            "text": prefix + made.text,
            "finish_reason": made.finish_reason,
            "logprobs": None,
        }
        if request.logprobs is not None:
            prompt = self._prompts[index // (request.n or 1)] if request.echo else []
            found["logprobs"] = self._logprobs(prompt, made.prompt_logprobs, made.token_ids, made.logprobs, 0)
        if request.return_token_ids:
            found["prompt_token_ids"] = self._prompts[index // (request.n or 1)]
            found["token_ids"] = made.token_ids
        return found

    def _chunk_object(self, piece: Piece, offset: int, begun: bool) -> dict[str, Any]:
        request = self._request
        echo = bool(request.echo) and not begun
        prefix = self._prompt_text(piece.index) if echo else ""
        found: dict[str, Any] = {
            "index": piece.index,
            "text": prefix + piece.text,
            "finish_reason": piece.finish_reason,
            "logprobs": None,
        }
        if request.logprobs is not None and piece.token_ids:
            prompt = self._prompts[piece.index // (request.n or 1)] if echo else []
            base = offset + (len(self._prompt_text(piece.index)) if request.echo and not echo else 0)
            found["logprobs"] = self._logprobs(prompt, piece.prompt_logprobs, piece.token_ids, piece.logprobs, base)
        if request.return_token_ids:
            found["token_ids"] = piece.token_ids
        return found

    def _logprobs(
        self,
        prompt: Sequence[int],
        prompt_logprobs: Sequence[common_pb2.TokenLogprobs],
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.TokenLogprobs],
        offset: int,
    ) -> dict[str, Any]:
        """OpenAI's parallel lists; the first prompt token has no probability."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        known: list[common_pb2.TokenLogprobs | None] = [*([None] if prompt else []), *prompt_logprobs]
        for token, logprob in zip([*prompt, *token_ids], [*known[: len(prompt)], *logprobs], strict=True):
            text = self._tokenizer.token_text(token)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
            values.append(None if logprob is None else logprob.chosen.logprob)
            tops.append(
                None
                if logprob is None
                else {self._tokenizer.token_text(top.token_id): top.logprob for top in logprob.top}
            )
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _usage(self, gathered: Sequence[_Gathered]) -> dict[str, Any]:
        prompt = sum(len(tokens) for tokens in self._prompts)
        made = sum(len(choice.token_ids) for choice in gathered)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in gathered)},
        }


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"
