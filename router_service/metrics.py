"""Metrics of the router, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router_service.workers import WorkerPool

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter("dsv4pd_router_requests", "HTTP requests answered.", ["path", "status"], registry=r)
        self.in_flight = Gauge("dsv4pd_router_in_flight", "Completions being served.", registry=r)
        self.first_token = Histogram(
            "dsv4pd_router_first_token_seconds", "Request to a choice's first token.", registry=r, buckets=_SECONDS
        )
        self.between_tokens = Histogram(
            "dsv4pd_router_between_tokens_seconds", "Time between a choice's pieces.", registry=r, buckets=_SECONDS
        )
        self.seconds = Histogram("dsv4pd_router_seconds", "Whole completions.", registry=r, buckets=_SECONDS)
        self.prompt_tokens = Counter("dsv4pd_router_prompt_tokens", "Tokens of prompts accepted.", registry=r)
        self.output_tokens = Counter("dsv4pd_router_output_tokens", "Tokens sent to clients.", registry=r)
        self.failures = Counter("dsv4pd_router_failures", "Completions that failed.", ["reason"], registry=r)
        self.shed = Counter("dsv4pd_router_shed", "Completions refused with 429 here.", registry=r)
        self.queue_seconds = Histogram(
            "dsv4pd_router_queue_seconds", "Wait of a choice for a slot.", registry=r, buckets=_SECONDS
        )
        self.choices = Gauge("dsv4pd_router_choices", "Choices at workers and waiting.", ["phase"], registry=r)


class _Workers(Collector):
    """Read when scraped, so that a worker that left has no series."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        usable = GaugeMetricFamily("dsv4pd_router_usable_workers", "Workers that can be chosen.", labels=["role"])
        breaker = GaugeMetricFamily(
            "dsv4pd_router_breaker_open", "Breakers: 0 closed, 1 open, 0.5 half open.", labels=["role", "address"]
        )
        outstanding = GaugeMetricFamily(
            "dsv4pd_router_worker_requests", "Choices of this router at a worker.", labels=["role", "address"]
        )
        for role, workers in (("prefill", self._workers.prefill), ("decode", self._workers.decode)):
            usable.add_metric([role], sum(w.can_take for w in workers))
            for worker in workers:
                state = {"closed": 0.0, "half_open": 0.5, "open": 1.0}[worker.breaker.state]
                breaker.add_metric([role, worker.address], state)
                outstanding.add_metric([role, worker.address], worker.requests)
        yield from (usable, breaker, outstanding)


def publish_workers(metrics: RouterMetrics, workers: WorkerPool) -> None:
    """Gauges about workers and lanes, read when scraped."""
    metrics.registry.register(_Workers(workers))
    metrics.choices.labels("running").set_function(lambda: workers.lanes.running)
    metrics.choices.labels("waiting").set_function(lambda: workers.lanes.waiting)
