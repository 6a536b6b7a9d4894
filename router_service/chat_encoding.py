"""From messages to a prompt.

DeepSeek-V4's format is that of its public model cards (encoding/README.md beside the weights). Control tokens are
looked up in the tokenizer and everything a client wrote is encoded without them, so that no message can spell a turn
of somebody else. A checkpoint whose tokenizer has no such tokens, like dsv4-nano, gets the plain template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.model.tokenizer import Tokenizer
from router_service.chat_protocol import ChatMessage
from router_service.errors import bad_request

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_OF_THINKING = "</think>"
# Part of the format: the model was trained with these words before everything else.
MAX_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)


@dataclass(frozen=True)
class Control:
    """A control token, by its spelling."""

    spelling: str


@dataclass(frozen=True)
class ChatPrompt:
    """`thinks`: what the model writes begins with its reasoning, up to `</think>`."""

    token_ids: list[int]
    thinks: bool


class ChatEncoding(Protocol):
    name: str

    def encode(self, messages: Sequence[ChatMessage], *, thinks: bool | None, most: bool) -> ChatPrompt:
        """`thinks`: None leaves it to the encoding; `most` asks for the most thorough reasoning. Raises HTTPError 400
        for what the encoding has no form for."""
        ...


def chat_encoding(tokenizer: Tokenizer) -> ChatEncoding:
    tokens = {
        spelling: tokenizer.control_token(spelling) for spelling in (BOS, EOS, USER, ASSISTANT, THINK, END_OF_THINKING)
    }
    known = {spelling: token for spelling, token in tokens.items() if token is not None}
    return DeepSeekV4Encoding(tokenizer, known) if len(known) == len(tokens) else PlainTemplate(tokenizer)


class PlainTemplate:
    """The messages' contents, one below the other: a base model knows no roles."""

    name = "plain"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, messages: Sequence[ChatMessage], *, thinks: bool | None, most: bool) -> ChatPrompt:
        if thinks:
            raise bad_request("reasoning_effort: this checkpoint has no thinking mode", "reasoning_effort")
        return ChatPrompt(self._tokenizer.encode_plain("\n".join(m.text for m in messages)), thinks=False)


class DeepSeekV4Encoding:
    """BOS, system text, then turns; an open assistant turn at the end. Thinking is on unless refused."""

    name = "deepseek_v4"

    def __init__(self, tokenizer: Tokenizer, control: dict[str, int]) -> None:
        self._tokenizer = tokenizer
        self._control = control

    def encode(self, messages: Sequence[ChatMessage], *, thinks: bool | None, most: bool) -> ChatPrompt:
        thinks = thinks is not False
        token_ids: list[int] = []
        for part in render(messages, thinks=thinks, most=most):
            if isinstance(part, Control):
                token_ids.append(self._control[part.spelling])
            elif part:
                token_ids += self._tokenizer.encode_plain(part)
        return ChatPrompt(token_ids, thinks)


def render(messages: Sequence[ChatMessage], *, thinks: bool, most: bool) -> list[Control | str]:
    """The prompt's parts. System messages come first, wherever they stood; neighbouring user messages are one turn;
    the reasoning of earlier turns is left out. `most`: ask for the most thorough reasoning."""
    system = [m.text for m in messages if m.role in ("system", "developer")]
    parts: list[Control | str] = [Control(BOS)]
    if thinks and most:
        parts.append(MAX_EFFORT)
    parts.append("\n\n".join(text for text in system if text))
    turn: list[str] = []
    open_turn = False
    for message in [m for m in messages if m.role in ("user", "assistant")]:
        if message.role == "user":
            turn.append(message.text)
            open_turn = True
            continue
        if open_turn:
            parts += [Control(USER), _joined(turn)]
        turn, open_turn = [], False
        parts += [Control(ASSISTANT), Control(END_OF_THINKING), message.text, Control(EOS)]
    if open_turn:
        parts += [Control(USER), _joined(turn)]
    return [*parts, Control(ASSISTANT), Control(THINK if thinks else END_OF_THINKING)]


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(text for text in texts if text)
