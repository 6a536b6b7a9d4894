"""The dashboard: what it asks for exists, and it is the generated one."""

import json
import re
from typing import Any

from prometheus_client import CollectorRegistry

from decode_service.metrics import DecodeMetrics
from prefill_service.metrics import PrefillMetrics
from router_service.metrics import RouterMetrics, publish_workers
from router_service.workers import WorkerPool
from tools.gen_dashboard import TARGET, page

METRIC = re.compile(r"dsv4pd_[a-z0-9_]+")
LABELS = re.compile(r"by \(([a-z_, ]+)\)")
GIVEN_BY_PROMETHEUS = {"instance", "job"}


def _panels() -> list[dict[str, Any]]:
    return [p for p in json.loads(TARGET.read_text())["panels"] if p["type"] != "row"]


def _queries() -> list[str]:
    return [target["expr"] for panel in _panels() for target in panel["targets"]]


async def _registries() -> list[CollectorRegistry]:
    router = RouterMetrics()
    pool = WorkerPool(["127.0.0.1:1"], ["127.0.0.1:1"], 1, 1)
    publish_workers(router, pool)
    return [router.registry, PrefillMetrics().registry, DecodeMetrics().registry]


async def _known() -> dict[str, set[str]]:
    """Every sample's name and its labels; a metric with labels that has no series yet counts too."""
    known: dict[str, set[str]] = {}
    for registry in await _registries():
        for collector in list(registry._collector_to_names):
            labels = set(getattr(collector, "_labelnames", ()))
            for name in registry._collector_to_names[collector]:
                known[name] = labels | ({"le"} if name.endswith("_bucket") else set())
            for family in collector.collect():
                for sample in family.samples:
                    known.setdefault(sample.name, set()).update(sample.labels)
    return known


async def test_every_metric_and_label_that_it_names_exists():
    known = await _known()
    named = {name for query in _queries() for name in METRIC.findall(query)}
    assert named - set(known) == set()
    for query in _queries():
        (metric, *_) = METRIC.findall(query)
        for label in {part.strip() for group in LABELS.findall(query) for part in group.split(",")}:
            assert label in known[metric] | GIVEN_BY_PROMETHEUS, query


async def test_it_shows_what_operators_were_promised():
    named = {name for query in _queries() for name in METRIC.findall(query)}
    for part in (
        "first_token",
        "between_tokens",
        "queue_seconds",
        "handover_seconds",
        "handover_bytes",
        "pool_pages",
        "hot_rows",
        "breaker_open",
        "shed",
        "failures",
    ):
        assert any(part in name for name in named), part


def test_panels_have_titles_ids_and_places_of_their_own():
    panels = json.loads(TARGET.read_text())["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    assert all(p["title"] for p in panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_it_is_the_generated_one():
    assert TARGET.read_text() == page(), "run python tools/gen_dashboard.py"
