"""Chat: from a body of /v1/chat/completions to a generation, and back to OpenAI's objects of it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from common.model.tokenizer import Tokenizer
from common.rpc.gen.dsv4pd.v1 import common_pb2
from router_service.answers import Envelope, Gathered
from router_service.chat_encoding import END_OF_THINKING, ChatEncoding, ChatPrompt
from router_service.chat_protocol import ChatRequest
from router_service.generate import Piece
from router_service.generation import Generation
from router_service.reasoning import ReasoningSplitter

# Memory for the whole output is reserved beforehand, so a body without a limit must not mean the whole context.
MOST_DEFAULT_TOKENS = 2048


def chat_generation(
    request: ChatRequest, encoding: ChatEncoding, vocab_size: int, context: int
) -> tuple[Generation, ChatPrompt]:
    """`context`: most tokens of prompt and output. Raises HTTPError 400."""
    request.check(vocab_size)
    prompt = encoding.encode(request.messages, thinks=request.wants_thinking, most=request.wants_most_thinking)
    generation = Generation(
        id=f"chatcmpl-{secrets.token_hex(16)}",
        request=request,
        prompts=[prompt.token_ids],
        param="messages",
        max_tokens=request.output_tokens or max(1, min(MOST_DEFAULT_TOKENS, context - len(prompt.token_ids))),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    return generation, prompt


class ChatAnswers:
    """Those of /v1/chat/completions. What the model thinks is `reasoning_content`, as in DeepSeek's own API."""

    def __init__(
        self, generation: Generation, request: ChatRequest, prompt: ChatPrompt, model_name: str, tokenizer: Tokenizer
    ) -> None:
        self._envelope = Envelope(generation, model_name)
        self._request = request
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._splitters = [ReasoningSplitter(END_OF_THINKING, thinks=prompt.thinks) for _ in self._envelope.made]
        self.wants_usage = self._envelope.wants_usage

    def add(self, piece: Piece) -> None:
        self._envelope.made[piece.index].add(piece)

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(made.as_piece(i), made, "message") for i, made in enumerate(self._envelope.made)]
        return self._envelope.whole("chat.completion", choices)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        made = self._envelope.made[piece.index]
        made.add(piece)
        return self._envelope.chunk("chat.completion.chunk", [self._choice(piece, made, "delta")])

    def usage_chunk(self) -> dict[str, Any]:
        return self._envelope.chunk("chat.completion.chunk", [])

    def _choice(self, piece: Piece, made: Gathered, kind: str) -> dict[str, Any]:
        """A whole message, or what a chunk adds to it: its role once, and no key for what it adds nothing to."""
        first, made.begun = not made.begun, True
        splitter = self._splitters[piece.index]
        reasoning, content = splitter.push(piece.text)
        if piece.finish_reason is not None:
            reasoning += splitter.finish()
        message: dict[str, Any] = {"role": "assistant"} if first else {}
        if kind == "message":
            message["content"] = content
            if self._prompt.thinks:
                message["reasoning_content"] = reasoning
        else:
            message |= {"reasoning_content": reasoning} if reasoning else {}
            message |= {"content": content} if content or (first and not self._prompt.thinks) else {}
        found: dict[str, Any] = {"index": piece.index, kind: message, "finish_reason": piece.finish_reason}
        wants = self._request.logprobs and piece.token_ids
        found["logprobs"] = {"content": self._logprobs(piece.logprobs)} if wants else None
        if self._request.return_token_ids:
            if first:
                found["prompt_token_ids"] = self._prompt.token_ids
            found["token_ids"] = piece.token_ids
        return found

    def _logprobs(self, logprobs: Sequence[common_pb2.TokenLogprobs]) -> list[dict[str, Any]]:
        """One entry a token, `</think>` and the ending token among them."""
        return [
            self._token(made.chosen) | {"top_logprobs": [self._token(top) for top in made.top]} for made in logprobs
        ]

    def _token(self, made: common_pb2.TokenLogprob) -> dict[str, Any]:
        text = self._tokenizer.token_text(made.token_id)
        content = self._tokenizer.id_to_bytes(made.token_id) or text.encode()
        return {"token": text, "logprob": made.logprob, "bytes": list(content)}
