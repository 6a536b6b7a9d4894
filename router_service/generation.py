"""What a body asks the workers for, once it is checked and tokenised: the same for text and for chat."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from common.model.tokenizer import Tokenizer
from router_service.errors import HTTPError, bad_request
from router_service.protocol import CompletionRequest, SamplingRequest, prompts_of

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class Generation:
    """`prompts`: n choices of each are made. `param` is the body's parameter that holds them. `logprobs`: best tokens
    to report besides the chosen one, None for no probabilities; `prompt_logprobs` likewise for the prompt."""

    id: str
    request: SamplingRequest
    prompts: Sequence[list[int]]
    param: str
    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None = None

    def check(self, vocab_size: int, context: int) -> None:
        """Raises HTTPError 400 for prompts that can't be computed. `context`: most tokens of prompt and output."""
        for tokens in self.prompts:
            self._check_prompt(tokens, vocab_size, context)
        if self.request.min_tokens > self.max_tokens:
            raise bad_request(
                f"min_tokens = {self.request.min_tokens} is above max_tokens = {self.max_tokens}", "min_tokens"
            )

    def _check_prompt(self, tokens: Sequence[int], vocab_size: int, context: int) -> None:
        if not tokens:
            raise bad_request(f"{self.param} is empty", self.param, "empty_prompt")
        if max(tokens) >= vocab_size:
            raise bad_request(
                f"{self.param}: token id {max(tokens)} is not in the vocabulary of {vocab_size}", self.param
            )
        if len(tokens) + self.max_tokens > context:
            raise HTTPError(
                400,
                f"this model's context is {context} tokens, but {self.param} ({len(tokens)} tokens) and max_tokens "
                f"({self.max_tokens}) together are more",
                self.param if len(tokens) >= context else "max_tokens",
                "context_length_exceeded",
            )


def text_generation(request: CompletionRequest, tokenizer: Tokenizer, vocab_size: int) -> Generation:
    """Of a body of /v1/completions. Raises HTTPError 400."""
    request.check(vocab_size)
    return Generation(
        id=f"cmpl-{secrets.token_hex(16)}",
        request=request,
        prompts=[tokenizer.encode(p) if isinstance(p, str) else p for p in prompts_of(request)],
        param="prompt",
        max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )
