"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from router_service.errors import bad_request
from router_service.protocol import MAX_LOGPROBS, SamplingRequest, check_text

MAX_MESSAGES = 4096
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Part):
    type: Literal["text"]
    text: str


class ChatMessage(_Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """Parts are paragraphs."""
        if isinstance(self.content, list):
            return "\n\n".join(part.text for part in self.content if part.text)
        return self.content or ""


class Thinking(_Part):
    type: Literal["enabled", "disabled"]


class TemplateOptions(_Part):
    thinking: bool | None = None


class ResponseFormat(_Part):
    type: Literal["text"]


class ChatRequest(SamplingRequest):
    """Thinking can be asked for in OpenAI's way (reasoning_effort), in DeepSeek's (thinking) and in that of open-source
    servers (chat_template_kwargs)."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None
    # What says that there are no tools is accepted; tools are not.
    tools: list[Any] | None = None
    tool_choice: Any = None

    def check(self, vocab_size: int) -> None:
        """What the types can't say. Raises HTTPError 400 that names the parameter."""
        if self.tools:
            raise bad_request("tools is not supported", "tools", "unsupported_parameter")
        if self.tool_choice not in (None, "none", "auto"):
            raise bad_request("tool_choice is not supported", "tool_choice", "unsupported_parameter")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs is only allowed when logprobs is true", "top_logprobs")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise bad_request(
                f"max_tokens = {self.max_tokens} and max_completion_tokens = {self.max_completion_tokens} differ",
                "max_completion_tokens",
            )
        check_messages(self.messages)
        self.check_sampling(vocab_size)

    @property
    def output_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_most_thinking(self) -> bool:
        return self.reasoning_effort in ("xhigh", "max")

    @property
    def wants_thinking(self) -> bool | None:
        """What the body says about it; None when it says nothing. Raises HTTPError 400 when it says both."""
        said: dict[str, bool] = {}
        if self.reasoning_effort is not None:
            said["reasoning_effort"] = self.reasoning_effort != "none"
        if self.thinking is not None:
            said["thinking"] = self.thinking.type == "enabled"
        if self.chat_template_kwargs is not None and self.chat_template_kwargs.thinking is not None:
            said["chat_template_kwargs"] = self.chat_template_kwargs.thinking
        if len(set(said.values())) > 1:
            raise bad_request(f"{' and '.join(said)} disagree about thinking", next(iter(said)))
        return next(iter(said.values()), None)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises HTTPError 400."""
    for message in messages:
        check_text(message.text, "messages")
        check_text(message.reasoning_content or "", "messages")
        if message.role != "assistant":
            if message.content is None:
                raise bad_request(f"messages: a {message.role} message has no content", "messages")
            if message.reasoning_content is not None:
                raise bad_request(f"messages: a {message.role} message has no reasoning_content", "messages")
