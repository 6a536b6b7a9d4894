"""Writes deploy/grafana/dsv4-pd.json, the one dashboard, from the list of panels below."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dsv4-pd.json"
WIDTH, HEIGHT, COLUMNS = 8, 8, 24
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    """(PromQL, legend)"""
    help: str = ""


def quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return tuple(
        (
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))",
            f"p{q * 100:g}{legend}",
        )
        for q in QUANTILES
    )


def rate(metric: str, by: str, legend: str = "") -> tuple[str, str]:
    return f"sum by ({by}) (rate({metric}[$__rate_interval]))", legend or f"{{{{{by}}}}}"


ROWS: dict[str, list[Panel]] = {
    "What clients see": [
        Panel("Time to first token", "s", quantiles("dsv4pd_router_first_token_seconds")),
        Panel("Between tokens", "s", quantiles("dsv4pd_router_between_tokens_seconds")),
        Panel("Whole completions", "s", quantiles("dsv4pd_router_seconds")),
        Panel("Answers by status", "reqps", (rate("dsv4pd_router_requests_total", "status"),)),
        Panel(
            "Tokens in and out",
            "short",
            (
                ("sum(rate(dsv4pd_router_prompt_tokens_total[$__rate_interval]))", "prompt tokens/s"),
                ("sum(rate(dsv4pd_router_output_tokens_total[$__rate_interval]))", "output tokens/s"),
            ),
        ),
        Panel(
            "Failures and sheds",
            "reqps",
            (
                rate("dsv4pd_router_failures_total", "reason"),
                ("sum(rate(dsv4pd_router_shed_total[$__rate_interval]))", "429 here"),
            ),
        ),
    ],
    "Router": [
        Panel(
            "Requests and choices",
            "short",
            (("sum(dsv4pd_router_in_flight)", "requests in flight"), ("sum by (phase) (dsv4pd_router_choices)", "choices {{phase}}")),
        ),
        Panel("Wait for a slot", "s", quantiles("dsv4pd_router_queue_seconds")),
        Panel(
            "Workers and breakers",
            "short",
            (
                ("min by (role) (dsv4pd_router_usable_workers)", "usable {{role}}"),
                ("max by (role, address) (dsv4pd_router_breaker_open)", "breaker {{role}} {{address}}"),
            ),
            "A breaker is 0 closed, 0.5 half open, 1 open; usable workers are the fewest that any router sees.",
        ),
        Panel("Choices at each worker", "short", (("sum by (role, address) (dsv4pd_router_worker_requests)", "{{role}} {{address}}"),)),
    ],
    "Prefill": [
        Panel("Prompts by phase", "short", (("sum by (phase) (dsv4pd_prefill_requests)", "{{phase}}"),)),
        Panel("Queue", "s", quantiles("dsv4pd_prefill_queue_seconds")),
        Panel("Computing a prompt", "s", quantiles("dsv4pd_prefill_seconds")),
        Panel("Tokens computed", "short", (rate("dsv4pd_prefill_tokens_total", "instance"),)),
        Panel("Step", "s", quantiles("dsv4pd_prefill_step_seconds")),
        Panel(
            "Failures by reason",
            "reqps",
            (
                rate("dsv4pd_prefill_failures_total", "reason"),
                rate("dsv4pd_prefill_transfer_failures_total", "reason", "posts: {{reason}}"),
            ),
        ),
    ],
    "KV handover": [
        Panel("Handover", "s", quantiles("dsv4pd_decode_handover_seconds"), "Prefill asked to handover verified."),
        Panel("Exposed transfer", "s", quantiles("dsv4pd_prefill_exposed_transfer_seconds"), "Not hidden behind computing."),
        Panel(
            "Bytes",
            "Bps",
            (rate("dsv4pd_prefill_sent_bytes_total", "instance", "sent {{instance}}"), rate("dsv4pd_decode_handover_bytes_total", "instance", "received {{instance}}")),
        ),
        Panel("Send ring in use", "bytes", (("sum by (instance) (dsv4pd_prefill_ring_bytes)", "{{instance}}"), (rate("dsv4pd_prefill_ring_waits_total", "instance", "waits/s {{instance}}")))),
    ],
    "Decode": [
        Panel("Requests by phase", "short", (("sum by (phase) (dsv4pd_decode_requests)", "{{phase}}"),)),
        Panel("Wait for memory", "s", quantiles("dsv4pd_decode_queue_seconds")),
        Panel("Step", "s", quantiles("dsv4pd_decode_step_seconds")),
        Panel("Tokens decoded", "short", (rate("dsv4pd_decode_tokens_total", "instance"),)),
        Panel("Batch", "short", quantiles("dsv4pd_decode_batch_size")),
        Panel("Host pages", "short", (('sum by (instance, state) (dsv4pd_decode_pool_pages{pool="host_c4"})', "{{state}} {{instance}}"),)),
        Panel("Other pools in use", "percentunit", (('sum by (pool) (dsv4pd_decode_pool_pages{pool!="host_c4",state="used"}) / sum by (pool) (dsv4pd_decode_pool_pages{pool!="host_c4"})', "{{pool}}"),)),
        Panel("Hot buffer", "short", (rate("dsv4pd_decode_hot_rows", "what", "{{what}} rows/s"),), "Hits, misses (rows fetched from the host) and backups (rows written to it)."),
        Panel(
            "Failures and quarantine",
            "reqps",
            (rate("dsv4pd_decode_failures_total", "reason"), ("sum(rate(dsv4pd_decode_quarantined_total[$__rate_interval]))", "quarantined")),
        ),
        Panel("Deadlines that passed", "reqps", (rate("dsv4pd_decode_deadlines_total", "which"),)),
        Panel("Fences and quarantine alarm", "short", (("dsv4pd_decode_fences", "fences {{instance}}"), ("dsv4pd_decode_quarantine_alarm", "alarm {{instance}}")), "A fence ends the transfer session of a prefill process that vanished; an alarm says that one can't be completed."),
    ],
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row, content in ROWS.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": row, "collapsed": False, "gridPos": place, "panels": []}
        )
        top += 1
        for index, panel in enumerate(content):
            x, y = index * WIDTH % COLUMNS, top + index * WIDTH // COLUMNS * HEIGHT
            panels.append(_panel(panel, len(panels) + 1, {"h": HEIGHT, "w": WIDTH, "x": x, "y": y}))
        top += -(-len(content) * WIDTH // COLUMNS) * HEIGHT
    return {
        "uid": "dsv4-pd",
        "title": "dsv4-pd",
        "tags": ["dsv4-pd"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    targets = [
        {"refId": chr(ord("A") + index), "datasource": source, "expr": query, "legendFormat": legend}
        for index, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def page() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
