"""Which of the usable workers takes a request: by load, and by affinity as long as load allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from common.errors import ErrorReason, ServiceError
from router_service.worker import Worker

HOST_PAGE_TOKENS = 256


@dataclass(frozen=True)
class PlacementSettings:
    prefix_tokens: int = 0
    """Prompts that begin with the same so many tokens go to the same prefill worker; 0 = off."""
    slack_tokens: int = 4096
    """How many more tokens than the least busy prefill worker an affine one may have to compute."""


def prefix_key(token_ids: Sequence[int], prefix_tokens: int) -> str:
    """Names the first `prefix_tokens` tokens of a prompt; empty when it is shorter or that is off."""
    if not prefix_tokens or len(token_ids) < prefix_tokens:
        return ""
    return xxhash.xxh3_64_hexdigest(np.asarray(token_ids[:prefix_tokens], dtype=np.uint32).tobytes())


def choose_decode(
    workers: Sequence[Worker], tokens: int, session: str = "", tried: frozenset[str] = frozenset()
) -> Worker:
    """The worker with the most free host pages, of those that take `tokens` of prompt and output where there are
    such. A session stays on its worker while that has pages for it. Raises ServiceError."""
    usable = _long_enough([w for w in workers if w.can_take and w.address not in tried], tokens)
    if not usable:
        raise ServiceError(ErrorReason.DECODE_UNAVAILABLE, _why("decode", workers), retry_after_s=1.0)
    if session:
        own = _affine(usable, session)
        if own.load - own.outstanding >= -(-tokens // HOST_PAGE_TOKENS):
            return own
    return max(usable, key=lambda w: (w.load - w.outstanding, -w.requests))


def choose_prefill(
    workers: Sequence[Worker],
    tokens: int,
    affinity: str = "",
    slack_tokens: int = 0,
    tried: frozenset[str] = frozenset(),
) -> Worker:
    """The worker with the fewest prompt tokens to compute, of those that take a prompt of `tokens` where there are
    such; the affine one instead unless it has over `slack_tokens` more of them. Raises ServiceError."""
    usable = _long_enough([w for w in workers if w.can_take and w.address not in tried], tokens)
    if not usable:
        raise ServiceError(ErrorReason.PREFILL_UNAVAILABLE, _why("prefill", workers), retry_after_s=1.0)
    least = min(usable, key=lambda w: (w.load + w.outstanding, w.requests))
    if affinity:
        own = _affine(usable, affinity)
        if own.load + own.outstanding <= least.load + least.outstanding + slack_tokens:
            return own
    return least


def _affine(workers: Sequence[Worker], key: str) -> Worker:
    """Rendezvous hashing: a worker that comes or goes moves only the keys that it gets or had."""
    return max(workers, key=lambda w: xxhash.xxh3_64_intdigest(f"{key} {w.address}".encode()))


def _long_enough(workers: list[Worker], tokens: int) -> list[Worker]:
    """Those whose context holds so many tokens; all if none does, as a worker's own refusal names its limit."""
    return [w for w in workers if w.context >= tokens] or workers


def _why(role: str, workers: Sequence[Worker]) -> str:
    problems = "; ".join(f"{w.address}: {w.trouble or 'tried'}" for w in workers) or "none is known"
    return f"no {role} worker is usable ({problems})"
