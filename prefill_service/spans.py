"""The phases of a Prefill call, read off its events."""

from __future__ import annotations

import time

from opentelemetry.trace import Span

from common import tracing
from common.rpc.gen.dsv4pd.v1 import prefill_pb2

METHOD = "/dsv4pd.v1.Prefill/Prefill"


class PrefillSpans:
    """queue, then prefill (computing), and beside it transfer: first page posted to last byte acknowledged."""

    def __init__(self, span: Span, begun_ns: int) -> None:
        self._span = span
        self._begun_ns = begun_ns
        self._started_ns = 0
        self._posted_ns = 0
        self._done: prefill_pb2.Done | None = None

    def saw(self, event: prefill_pb2.PrefillEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "started":
            self._started_ns = event.unix_ns
        elif kind == "pages_sent":
            self._posted_ns = self._posted_ns or event.pages_sent.posted_unix_ns
        elif kind == "done":
            self._done = event.done

    def end(self) -> None:
        now = time.time_ns()
        computed = self._done.timings.last_chunk_unix_ns if self._done is not None else now
        marks = [("queue", self._started_ns or now)]
        if self._started_ns:
            marks += [("prefill", computed)]
        tracing.intervals(self._span, marks, self._begun_ns)
        if self._done is not None:
            begun = min(self._posted_ns or computed, now)
            transfer = tracing.child("transfer", self._span, begun)
            transfer.set_attribute("bytes", self._done.timings.bytes_sent)
            transfer.end(max(begun, computed + self._done.timings.exposed_transfer_ns))
