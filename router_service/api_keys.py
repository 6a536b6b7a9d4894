"""API keys: a TOML file with the SHA-256 of each, and what each may do at a time and a minute.

    [[key]]
    name = "alice"                # shown in logs, in place of the key
    sha256 = "…64 hex digits…"    # `dsv4-pd keys new alice` makes a key and this entry
    max_concurrent = 8            # requests at a time; 0 or absent = no bound
    requests_per_minute = 600     # with bursts up to all of them; 0 or absent = no bound

Keys are long and random, so one round of SHA-256 is enough to keep them.
"""

from __future__ import annotations

import hashlib
import hmac
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class ApiKey(BaseModel):
    """One entry of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=64)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    max_concurrent: int = Field(0, ge=0)
    requests_per_minute: float = Field(0, ge=0)


@dataclass
class Usage:
    """What one key does now; `allowance` are requests that it may still begin at once."""

    key: ApiKey
    allowance: float
    counted_at: float
    running: int = 0

    def wait_s(self, now: float) -> float:
        """Seconds until another request may begin; 0 = now."""
        rate = self.key.requests_per_minute / 60
        if not rate:
            return 0.0
        self.allowance = min(self.key.requests_per_minute, self.allowance + (now - self.counted_at) * rate)
        self.counted_at = now
        return max(0.0, (1 - self.allowance) / rate)

    @property
    def is_full(self) -> bool:
        return bool(self.key.max_concurrent) and self.running >= self.key.max_concurrent


class ApiKeys:
    """The keys of the file and their use."""

    def __init__(self, keys: list[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        now = clock()
        self._usage = [(bytes.fromhex(key.sha256), Usage(key, max(1.0, key.requests_per_minute), now)) for key in keys]

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Raises ValueError that names the file and the entry, OSError when it can't be read."""
        try:
            content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None
        entries = content.pop("key", [])
        if content or not isinstance(entries, list) or not entries:
            raise ValueError(f"{path}: expected [[key]] tables and nothing else")
        keys: list[ApiKey] = []
        for number, entry in enumerate(entries):
            try:
                keys.append(ApiKey.model_validate(entry))
            except ValidationError as error:
                # Not its input: somebody may have put the key itself where its digest belongs.
                problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
                raise ValueError(f"{path}: key {number}: {problems}") from None
        for field in ("name", "sha256"):
            values = [getattr(key, field) for key in keys]
            if len(set(values)) < len(values):
                raise ValueError(f"{path}: two keys have the same {field}")
        return cls(keys)

    def find(self, secret: bytes) -> Usage | None:
        """The key's use. Compares with every entry in constant time, so that time tells nothing about them."""
        digest = hashlib.sha256(secret).digest()
        found: Usage | None = None
        for known, usage in self._usage:
            if hmac.compare_digest(digest, known):
                found = usage
        return found

    def now(self) -> float:
        return self._clock()
