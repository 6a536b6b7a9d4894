"""Metrics of the prefill service, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class PrefillMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.step_seconds = Histogram(
            "dsv4pd_prefill_step_seconds", "Time of one forward pass over chunks.", registry=r, buckets=_SECONDS
        )
        self.tokens = Counter("dsv4pd_prefill_tokens", "Prompt tokens computed.", registry=r)
        self.queue_seconds = Histogram(
            "dsv4pd_prefill_queue_seconds", "Wait of a prompt before computing.", registry=r, buckets=_SECONDS
        )
        self.prefill_seconds = Histogram(
            "dsv4pd_prefill_seconds", "Computing a prompt, first to last chunk.", registry=r, buckets=_SECONDS
        )
        self.exposed_seconds = Histogram(
            "dsv4pd_prefill_exposed_transfer_seconds",
            "Last chunk computed to last byte acknowledged.",
            registry=r,
            buckets=_SECONDS,
        )
        self.sent_bytes = Counter("dsv4pd_prefill_sent_bytes", "KV bytes acknowledged by receivers.", registry=r)
        self.done = Counter("dsv4pd_prefill_requests_done", "Prompts handed over.", registry=r)
        self.shared = Counter("dsv4pd_prefill_shared", "Prompts computed with an identical one.", registry=r)
        self.failures = Counter("dsv4pd_prefill_failures", "Prompts not handed over.", ["reason"], registry=r)
        self.transfer_failures = Counter(
            "dsv4pd_prefill_transfer_failures", "Posts of pages that failed.", ["reason"], registry=r
        )
        self.deadlines = Counter("dsv4pd_prefill_deadlines", "Deadlines that passed.", ["which"], registry=r)
        self.late_messages = Counter(
            "dsv4pd_prefill_late_messages",
            "Messages about requests that are over or here already.",
            ["what"],
            registry=r,
        )
        self.ring_waits = Counter("dsv4pd_prefill_ring_waits", "Steps put off as the send ring was full.", registry=r)
        self.requests = Gauge("dsv4pd_prefill_requests", "Prompts in the service.", ["phase"], registry=r)
        self.ring_bytes = Gauge("dsv4pd_prefill_ring_bytes", "Send ring bytes in use.", registry=r)

    def counts(self) -> dict[str, float]:
        """Prompts shared, deadlines that passed and messages that were ignored, for GetStatus."""
        families = {"deadline": self.deadlines, "late": self.late_messages, "shared": self.shared}
        return {
            "_".join([name, *sample.labels.values()]): sample.value
            for name, counter in families.items()
            for family in counter.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    def step(self, seconds: float, tokens: int) -> None:
        self.step_seconds.observe(seconds)
        self.tokens.inc(tokens)
