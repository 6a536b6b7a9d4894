"""Metrics of the router, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
        self.usable = Gauge("dsv4pd_router_usable_workers", "Workers that can be chosen.", ["role"], registry=r)
