"""OpenAI's objects: what a completion looks like, whole or as one chunk of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.model.tokenizer import Tokenizer, decode
from common.rpc.gen.dsv4pd.v1 import common_pb2
from router_service.generate import Piece
from router_service.generation import Generation
from router_service.protocol import CompletionRequest, prompts_of


class Answers(Protocol):
    """Builds the objects of one request: either `add` every piece and take `whole`, or take a `chunk` of each."""

    wants_usage: bool

    def add(self, piece: Piece) -> None: ...

    def whole(self) -> dict[str, Any]: ...

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The object of a stream's next event."""
        ...

    def usage_chunk(self) -> dict[str, Any]:
        """The object of a stream's last event, when usage was asked for."""
        ...


@dataclass
class Gathered:
    """A choice as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=lambda: list[int]())
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=lambda: list[common_pb2.TokenLogprobs]())
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=lambda: list[common_pb2.TokenLogprobs]())
    finish_reason: str | None = None
    cached_tokens: int = 0
    # Whether anything of it was shown: the first chunk also says what is said once.
    begun: bool = False
    # Where the next token's spelling begins in the text, as OpenAI counts it: in characters, from the first token on.
    text_offset: int = 0

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.prompt_logprobs += piece.prompt_logprobs
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)

    def as_piece(self, index: int) -> Piece:
        return Piece(index, self.text, self.token_ids, self.logprobs, self.prompt_logprobs, self.finish_reason)


class Envelope:
    """What every object of a request has in common: names, times, and the tokens counted so far. Choice i belongs to
    prompt i // n."""

    def __init__(self, generation: Generation, model_name: str) -> None:
        self.choices_each = generation.request.n or 1
        self.made = [Gathered() for _ in range(len(generation.prompts) * self.choices_each)]
        options = generation.request.stream_options
        self.wants_usage = options is not None and options.include_usage
        self._counts_on = self.wants_usage and options is not None and options.continuous_usage_stats
        self._prompts = generation.prompts
        self._id = generation.id
        self._model_name = model_name
        self._created = int(time.time())

    def whole(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._object(kind, choices) | {"usage": self._usage()}

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Its usage is null until the last one, and not there at all unless it was asked for."""
        made = self._object(kind, choices)
        if self.wants_usage:
            made["usage"] = self._usage() if self._counts_on or not choices else None
        return made

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model_name,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(tokens) for tokens in self._prompts)
        made = sum(len(choice.token_ids) for choice in self.made)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in self.made)},
        }


class TextAnswers:
    """Those of /v1/completions."""

    def __init__(
        self, generation: Generation, request: CompletionRequest, model_name: str, tokenizer: Tokenizer
    ) -> None:
        self._envelope = Envelope(generation, model_name)
        self._request = request
        self._prompts = generation.prompts
        self._tokenizer = tokenizer
        self.wants_usage = self._envelope.wants_usage

    def add(self, piece: Piece) -> None:
        self._envelope.made[piece.index].add(piece)

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(made.as_piece(i), made) for i, made in enumerate(self._envelope.made)]
        return self._envelope.whole("text_completion", choices)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        made = self._envelope.made[piece.index]
        made.add(piece)
        return self._envelope.chunk("text_completion", [self._choice(piece, made)])

    def usage_chunk(self) -> dict[str, Any]:
        return self._envelope.chunk("text_completion", [])

    def _choice(self, piece: Piece, made: Gathered) -> dict[str, Any]:
        """`piece` as a choice; the first one carries what is said once: the echo and the prompt's token ids."""
        request = self._request
        first, made.begun = not made.begun, True
        echo = bool(request.echo) and first
        place = piece.index // self._envelope.choices_each
        found: dict[str, Any] = {
            "index": piece.index,
            "text": (self._prompt_text(place) if echo else "") + piece.text,
            "finish_reason": piece.finish_reason,
            "logprobs": None,
        }
        if request.logprobs is not None and piece.token_ids:
            found["logprobs"] = self._logprobs(piece, self._prompts[place] if echo else [], made)
        if request.return_token_ids:
            if first:
                found["prompt_token_ids"] = self._prompts[place]
            found["token_ids"] = piece.token_ids
        return found

    def _prompt_text(self, place: int) -> str:
        prompt = prompts_of(self._request)[place]
        return prompt if isinstance(prompt, str) else decode(self._tokenizer, prompt)

    def _logprobs(self, piece: Piece, prompt: Sequence[int], made: Gathered) -> dict[str, Any]:
        """OpenAI's parallel lists; the first prompt token has no probability. Moves the choice's text offset on."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        known: list[common_pb2.TokenLogprobs | None] = [None, *piece.prompt_logprobs] if prompt else []
        for token, logprob in zip([*prompt, *piece.token_ids], [*known, *piece.logprobs], strict=True):
            text = self._tokenizer.token_text(token)
            tokens.append(text)
            offsets.append(made.text_offset)
            made.text_offset += len(text)
            values.append(None if logprob is None else logprob.chosen.logprob)
            tops.append(
                None
                if logprob is None
                else {self._tokenizer.token_text(top.token_id): top.logprob for top in logprob.top}
            )
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
