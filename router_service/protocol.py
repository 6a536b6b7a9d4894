"""The parameters of a body that are honoured; any other is refused by name."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from router_service.errors import bad_request

MAX_LOGPROBS = 20
MAX_CHOICES = 128  # of one prompt
MAX_CALLS = 1024  # prompts times choices: each is a call to a worker
MAX_STOPS = 64
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
Token = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingRequest(BaseModel):
    """What both endpoints share. Names and defaults are OpenAI's, with the widely used additions of open-source
    servers."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    min_tokens: int = Field(0, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=1000)
    logit_bias: dict[str, float] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)

    @field_validator("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    def check_sampling(self, vocab_size: int) -> None:
        """What the types can't say. Raises HTTPError 400 that names the parameter."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed when stream is true", "stream_options")
        for token in self.stop_token_ids or ():
            if token >= vocab_size:
                raise bad_request(f"stop_token_ids: {token} is not below {vocab_size}", "stop_token_ids")
        for stop in self.stops:
            check_text(stop, "stop")
        if len(self.stops) > MAX_STOPS:
            raise bad_request(f"stop: {len(self.stops)} strings, at most {MAX_STOPS}", "stop")
        if any(not stop for stop in self.stops):
            raise bad_request("stop: a stop string is empty", "stop")
        self.biases(vocab_size)

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def biases(self, vocab_size: int) -> dict[int, float]:
        """logit_bias by token id. Raises HTTPError 400."""
        found: dict[int, float] = {}
        for key, value in (self.logit_bias or {}).items():
            if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
                raise bad_request(f"logit_bias: {key!r} is not a token id below {vocab_size}", "logit_bias")
            if not -100 <= value <= 100:
                raise bad_request(f"logit_bias: {value} for token {key} is not in [-100, 100]", "logit_bias")
            found[int(key)] = value
        return found


class CompletionRequest(SamplingRequest):
    """The body of POST /v1/completions."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: str | None = None

    def check(self, vocab_size: int) -> None:
        """What the types can't say. Raises HTTPError 400 that names the parameter."""
        if self.suffix:
            raise bad_request("suffix is not supported", "suffix", "unsupported_parameter")
        choices, prompts = self.n or 1, prompts_of(self)
        if len(prompts) * choices > MAX_CALLS:
            raise bad_request(
                f"{len(prompts)} texts or token lists in prompt times n = {choices} are more than {MAX_CALLS} choices",
                "prompt" if choices == 1 else "n",
            )
        if self.best_of is not None and self.best_of not in (1, choices):
            raise bad_request(f"best_of = {self.best_of} is not supported, only 1 or n", "best_of")
        for prompt in prompts:
            if isinstance(prompt, str):
                check_text(prompt, "prompt")
        self.check_sampling(vocab_size)


def check_text(text: str, param: str) -> None:
    """Raises HTTPError 400 for half a surrogate pair, which JSON can spell and UTF-8 can't."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(f"{param}: half a surrogate pair is no text", param) from None


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a request, each text or token ids. Raises HTTPError 400 for none or an empty one."""
    prompt: Any = request.prompt
    if isinstance(prompt, str):
        found: list[str | list[int]] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        found = [prompt]
    else:
        found = list(prompt)
    if not found or any(len(part) == 0 for part in found):
        raise bad_request("prompt is empty", "prompt", "empty_prompt")
    return found
