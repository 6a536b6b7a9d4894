"""Metrics of the decode service, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class DecodeMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.step_seconds = Histogram(
            "dsv4pd_decode_step_seconds", "Time of one decode step.", registry=r, buckets=_SECONDS
        )
        self.batch = Histogram(
            "dsv4pd_decode_batch_size", "Requests in a step.", registry=r, buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
        )
        self.tokens = Counter("dsv4pd_decode_tokens", "Tokens decoded.", registry=r)
        self.queue_seconds = Histogram(
            "dsv4pd_decode_queue_seconds", "Wait of a request for memory.", registry=r, buckets=_SECONDS
        )
        self.overtakes = Counter(
            "dsv4pd_decode_overtakes", "Requests that got memory before an earlier one that did not fit.", registry=r
        )
        self.handover_seconds = Histogram(
            "dsv4pd_decode_handover_seconds", "Prefill asked to handover verified.", registry=r, buckets=_SECONDS
        )
        self.handover_bytes = Counter("dsv4pd_decode_handover_bytes", "KV bytes received.", registry=r)
        self.digest_seconds = Counter("dsv4pd_decode_digest_seconds", "Time spent checking digests.", registry=r)
        self.finished = Counter("dsv4pd_decode_requests_finished", "Requests that ended well.", ["reason"], registry=r)
        self.failures = Counter("dsv4pd_decode_failures", "Requests that did not.", ["reason"], registry=r)
        self.quarantined = Counter("dsv4pd_decode_quarantined", "Requests whose pages were set aside.", registry=r)
        self.late_events = Counter(
            "dsv4pd_decode_late_events", "Messages that came late, twice or for others, ignored.", registry=r
        )
        self.deadlines = Counter("dsv4pd_decode_deadlines", "Deadlines that passed.", ["which"], registry=r)
        self.quarantine_seconds = Histogram(
            "dsv4pd_decode_quarantine_seconds", "Time that pages were set aside.", registry=r, buckets=_SECONDS
        )
        self.quarantine_alarm = Gauge("dsv4pd_decode_quarantine_alarm", "1 when somebody should look.", registry=r)
        self.fences = Gauge("dsv4pd_decode_fences", "Transfer sessions fenced since start.", registry=r)
        self.requests = Gauge("dsv4pd_decode_requests", "Requests in the service.", ["phase"], registry=r)
        self.pool = Gauge("dsv4pd_decode_pool_pages", "Pages by pool and state.", ["pool", "state"], registry=r)
        self.fragmentation = Gauge(
            "dsv4pd_decode_pool_fragmentation",
            "Of pools that give extents: mean_extent_pages, free_runs, largest_free_run.",
            ["pool", "what"],
            registry=r,
        )
        self.prefix = Gauge(
            "dsv4pd_decode_prefix_cache",
            "Since start: hits and misses (requests), hit_pages, evictions (pages).",
            ["what"],
            registry=r,
        )
        self.hot = Gauge(
            "dsv4pd_decode_hot_rows",
            "Since start, selected C4 rows: resident, hits (hot buffer), misses (swapped in); backups (rows); "
            "loads and spills (resident pages over all layers).",
            ["what"],
            registry=r,
        )

    def counts(self) -> dict[str, float]:
        """Deadlines that passed and messages that were ignored, for GetStatus."""
        families = {"deadline": self.deadlines, "late": self.late_events}
        (digest,) = self.digest_seconds.collect()
        return {"digest_seconds": digest.samples[0].value} | {
            "_".join([name, *sample.labels.values()]): sample.value
            for name, counter in families.items()
            for family in counter.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    def step(self, seconds: float, batch: int) -> None:
        self.step_seconds.observe(seconds)
        self.batch.observe(batch)
        self.tokens.inc(batch)
