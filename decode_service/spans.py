"""The phases of a Generate call, read off its events."""

from __future__ import annotations

import time

from opentelemetry.trace import Span

from common import tracing
from common.rpc.gen.dsv4pd.v1 import decode_pb2

METHOD = "/dsv4pd.v1.Decode/Generate"


class GenerateSpans:
    """reserve (queue and memory), prefill (its queue and computing), transfer (what of it was not hidden behind
    computing), admit, decode. Where prefill's computing ended is known only when all is over."""

    def __init__(self, span: Span, begun_ns: int) -> None:
        self._span = span
        self._begun_ns = begun_ns
        self._reserved_ns = 0
        self._first_token_ns = 0
        self._finished: decode_pb2.Finished | None = None

    def saw(self, event: decode_pb2.GenerateEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "reserved":
            self._reserved_ns = event.unix_ns
        elif kind == "tokens":
            self._first_token_ns = self._first_token_ns or event.unix_ns
        elif kind == "finished":
            self._finished = event.finished

    def end(self) -> None:
        now = time.time_ns()
        marks = [("reserve", self._reserved_ns or now)]
        if self._reserved_ns:
            timings = self._finished.prefill if self._finished is not None else None
            if timings is not None and timings.last_chunk_unix_ns:
                landed = timings.last_chunk_unix_ns + timings.exposed_transfer_ns
                marks += [("prefill", timings.last_chunk_unix_ns), ("transfer", landed)]
                marks += [("admit", self._first_token_ns or now)]
            else:
                marks += [("prefill", self._first_token_ns or now)]
        if self._first_token_ns:
            marks += [("decode", now)]
        tracing.intervals(self._span, marks, self._begun_ns)
        if self._finished is not None:
            self._span.set_attribute("prompt_tokens", self._finished.prompt_tokens)
            self._span.set_attribute("completion_tokens", self._finished.completion_tokens)
