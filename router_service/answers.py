"""OpenAI's objects: what a completion looks like, whole or as one chunk of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.model.tokenizer import Tokenizer, decode
from common.rpc.gen.dsv4pd.v1 import common_pb2
from router_service.generate import Piece
from router_service.protocol import CompletionRequest, prompts_of


@dataclass
class Gathered:
    """A choice as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=lambda: list[int]())
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=lambda: list[common_pb2.TokenLogprobs]())
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=lambda: list[common_pb2.TokenLogprobs]())
    finish_reason: str | None = None
    cached_tokens: int = 0
    # Where the next token's spelling begins in the text, as OpenAI counts it: in characters, from the first token on.
    text_offset: int = 0

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.prompt_logprobs += piece.prompt_logprobs
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)


class Answers:
    """Builds the objects of one request. Choice i belongs to prompt i // n."""

    def __init__(
        self,
        completion_id: str,
        model_name: str,
        request: CompletionRequest,
        prompts: Sequence[list[int]],
        tokenizer: Tokenizer,
    ) -> None:
        self._id = completion_id
        self._model_name = model_name
        self._request = request
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._created = int(time.time())
        options = request.stream_options
        self.wants_usage = options is not None and options.include_usage
        self._counts_on = self.wants_usage and options is not None and options.continuous_usage_stats
        self._gathered = [Gathered() for _ in range(len(prompts) * (request.n or 1))]

    def add(self, piece: Piece) -> None:
        """Takes in a piece for `whole`."""
        self._gathered[piece.index].add(piece)

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream, when every piece was added."""
        choices: list[dict[str, Any]] = []
        for index, made in enumerate(self._gathered):
            whole = Piece(index, made.text, made.token_ids, made.logprobs, made.prompt_logprobs, made.finish_reason)
            choices.append(self._choice(whole, made, first=True))
        return self._object(choices) | {"usage": self._usage()}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The object of a stream's next event."""
        made = self._gathered[piece.index]
        first = not made.token_ids
        made.add(piece)
        chunk = self._object([self._choice(piece, made, first=first)])
        if self.wants_usage:
            chunk["usage"] = self._usage() if self._counts_on else None
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """The object of a stream's last event, when usage was asked for."""
        return self._object([]) | {"usage": self._usage()}

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model_name,
            "choices": choices,
        }

    def _choice(self, piece: Piece, made: Gathered, *, first: bool) -> dict[str, Any]:
        """`piece` as a choice; the choice's `first` carries what is said once: the echo and the prompt's token ids."""
        request = self._request
        echo = bool(request.echo) and first
        place = piece.index // (request.n or 1)
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

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(tokens) for tokens in self._prompts)
        made = sum(len(choice.token_ids) for choice in self._gathered)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in self._gathered)},
        }
