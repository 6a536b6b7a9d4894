"""Choosing the next token. A row's result depends on its own request alone, never on the batch.

The random number for the token at position t is a function of (seed, t): the same seed gives the same text
after a restart, in another batch, or when the first token is sampled by another process than the rest.
Reported log-probabilities are those of the unmodified model distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from common.errors import ErrorReason, ServiceError

MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingSettings:
    """What a client asks for; neutral values: temperature 0 (greedy), top_p 1, top_k 0, min_p 0, penalties 0 and
    repetition_penalty 1. `logprobs` = n wants the chosen token's and the n best; None wants none."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: dict[int, float]())
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def check(self, vocab_size: int) -> None:
        """Raises ServiceError(INVALID_REQUEST) that names the parameter and its value."""
        ranges: tuple[tuple[str, float, float, float], ...] = (
            ("temperature", self.temperature, 0, 100),
            ("top_p", self.top_p, 0, 1),
            ("min_p", self.min_p, 0, 1),
            ("presence_penalty", self.presence_penalty, -2, 2),
            ("frequency_penalty", self.frequency_penalty, -2, 2),
            ("repetition_penalty", self.repetition_penalty, 1e-3, 1e3),
            ("top_k", self.top_k, 0, 2**31),
            ("seed", self.seed, 0, MAX_SEED),
            ("logprobs", self.logprobs or 0, 0, MAX_LOGPROBS),
            ("prompt_logprobs", self.prompt_logprobs or 0, 0, MAX_LOGPROBS),
            ("max_tokens", self.max_tokens, 1, 2**31),
            ("min_tokens", self.min_tokens, 0, self.max_tokens),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:
                raise _invalid(name, value, f"must be in [{low:g}, {high:g}]")
        if self.top_p == 0:
            raise _invalid("top_p", self.top_p, "must be above 0")
        for token in (*self.stop_token_ids, *self.logit_bias):
            if not 0 <= token < vocab_size:
                name = "stop_token_ids" if token in self.stop_token_ids else "logit_bias"
                raise _invalid(name, token, f"is not a token id in [0, {vocab_size})")
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise _invalid("logit_bias", bias, f"for token {token} must be in [-100, 100]")


def _invalid(name: str, value: object, what: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_REQUEST, f"{name} = {value} {what}", field=name, theirs=value)


@dataclass(frozen=True)
class SampledToken:
    """logprob and top (token id, logprob; best first) are NaN-free; top is empty unless asked for."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SamplingState:
    """One request's settings and what it has seen. `stops` are the token ids that end it."""

    def __init__(self, settings: SamplingSettings, prompt: Sequence[int], eos_ids: Sequence[int]) -> None:
        self.settings = settings
        self.prompt_length = len(prompt)
        self.generated: list[int] = []
        self.stops = frozenset(settings.stop_token_ids) | (frozenset() if settings.ignore_eos else frozenset(eos_ids))
        self._counts: dict[int, int] = {}
        repeats = settings.repetition_penalty != 1.0
        self._seen: set[int] = set(prompt) if repeats else set()

    def append(self, token_id: int) -> None:
        self.generated.append(token_id)
        self._counts[token_id] = self._counts.get(token_id, 0) + 1
        if self.settings.repetition_penalty != 1.0:
            self._seen.add(token_id)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the largest raw logit is the answer."""
        s = self.settings
        return (
            s.temperature == 0
            and not s.logit_bias
            and s.presence_penalty == s.frequency_penalty == 0
            and s.repetition_penalty == 1
            and len(self.generated) >= s.min_tokens
        )

    def adjusted(self, logits: Tensor) -> Tensor:
        """logits [vocab] fp32 after penalties, bias and the ban of stop tokens before min_tokens; a copy."""
        s = self.settings
        logits = logits.clone()
        if self._seen:
            ids = torch.tensor(sorted(self._seen))
            values = logits[ids]
            logits[ids] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
        if self._counts and (s.presence_penalty or s.frequency_penalty):
            ids = torch.tensor(list(self._counts))
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            logits[ids] -= s.presence_penalty + s.frequency_penalty * counts
        for token, bias in s.logit_bias.items():
            logits[token] += bias
        if len(self.generated) < s.min_tokens and self.stops:
            logits[torch.tensor(sorted(self.stops))] = float("-inf")
        return logits


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """logits [B, vocab] fp32, one row a state; the states are not changed.

    Raises ServiceError(INTERNAL) for a row with NaN.
    """
    if logits.shape[0] != len(states):
        raise ValueError(f"{logits.shape[0]} rows of logits but {len(states)} requests")
    bad = torch.isnan(logits).any(dim=1)
    if bool(bad.any()):
        raise ServiceError(ErrorReason.INTERNAL, f"the model gave NaN logits for row {int(bad.nonzero()[0])}")
    best: list[int] = logits.argmax(dim=1).tolist()
    chosen = [
        best[row] if state.is_plain_greedy else _choose(state.adjusted(logits[row]), state)
        for row, state in enumerate(states)
    ]
    return [
        SampledToken(token, 0.0)
        if state.settings.logprobs is None
        else with_logprobs(logits[row], token, state.settings.logprobs)
        for row, (token, state) in enumerate(zip(chosen, states, strict=True))
    ]


def with_logprobs(logits: Tensor, token_id: int, top: int) -> SampledToken:
    """The token with its log-probability under logits [vocab] and the `top` best tokens' ones."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    best = logprobs.topk(min(top, logprobs.shape[0]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return SampledToken(token_id, float(logprobs[token_id]), tuple(pairs))


def _choose(logits: Tensor, state: SamplingState) -> int:
    s = state.settings
    if s.temperature == 0:
        return int(logits.argmax())
    ordered, ids = logits.double().sort(descending=True, stable=True)
    if s.top_k:
        ordered, ids = ordered[: s.top_k], ids[: s.top_k]
    weights = ((ordered - ordered[0]) / s.temperature).exp()
    if s.top_p < 1:
        before = (weights.cumsum(0) - weights) / weights.sum()
        weights = weights[before < s.top_p]
    if s.min_p > 0:
        weights = weights[weights >= s.min_p]
    cumulative = weights.cumsum(0)
    draw = uniform(s.seed, state.prompt_length + len(state.generated)) * float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, torch.tensor(draw, dtype=torch.float64), right=True))
    return int(ids[min(place, len(weights) - 1)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position alone (Philox, counter-based)."""
    value = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
    return float(value)
