"""One request in the decode service and the events that leave it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from common.errors import ServiceError
from common.kv.layout import LOGICAL_PAGE_TOKENS
from common.sampling import SampledToken, SamplingState
from decode_service.resources import RequestResources

Phase = Literal["queued", "prefilling", "running", "draining", "ended"]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class ReservedEvent:
    resources: RequestResources
    queued_ns: int


@dataclass(frozen=True)
class TokenEvent:
    token: SampledToken


@dataclass(frozen=True)
class FinishedEvent:
    reason: FinishReason
    stop_token_id: int | None
    decode_ns: int


@dataclass(frozen=True)
class FailedEvent:
    error: ServiceError


Event = ReservedEvent | TokenEvent | FinishedEvent | FailedEvent


class DecodeRequest:
    """State belongs to the engine's thread; `emit` takes events from it and must not block. At most max_tokens
    token events are ever emitted, which bounds what a slow reader can leave waiting."""

    def __init__(
        self,
        request_id: str,
        generation: int,
        token_ids: list[int],
        sampling: SamplingState,
        emit: Callable[[Event], None],
    ) -> None:
        self.request_id = request_id
        self.generation = generation
        self.token_ids = token_ids
        self.sampling = sampling
        self.emit = emit
        self.phase: Phase = "queued"
        self.resources: RequestResources | None = None
        self.peer = ""
        # The Mooncake session that its writer was given.
        self.session = ""
        self.prefill_answered = False
        # The client was told; whoever serves it gives the memory back, and nothing else happens to it.
        self.aborted = False
        # Names of its full pages, see common.kv.prefix; empty where nothing is cached.
        self.chain = b""
        # The client has its answer; the id may be used again even if memory is still being given back.
        self.answered = False
        self.arrived_ns = time.time_ns()
        self.admitted_ns = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, those whose pages were cached."""
        return len(self.resources.prefix) * LOGICAL_PAGE_TOKENS if self.resources is not None else 0

    @property
    def total_tokens(self) -> int:
        """Prompt and all output it may make: what memory is reserved for."""
        return self.prompt_tokens + self.sampling.settings.max_tokens

    @property
    def position(self) -> int:
        """Of the token to be decoded next: the last one made."""
        return self.prompt_tokens + len(self.sampling.generated) - 1

    def accept(self, token: SampledToken) -> FinishedEvent | None:
        """Emits a token; returns how the request finished, if this token ended it."""
        self.sampling.append(token.token_id)
        self.emit(TokenEvent(token))
        made = len(self.sampling.generated)
        decode_ns = time.time_ns() - self.admitted_ns
        if token.token_id in self.sampling.stops and made >= self.sampling.settings.min_tokens:
            return FinishedEvent("stop", token.token_id, decode_ns)
        if made >= self.sampling.settings.max_tokens:
            return FinishedEvent("length", None, decode_ns)
        return None
