"""One request through three processes: one trace, one id in every log; and nothing of it when no endpoint is set."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.cluster import Cluster

pytestmark = pytest.mark.system
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector:
    """Takes what OTLP/HTTP exporters send."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    service = next(
                        a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
                    )
                    collector.spans += [(service, s) for scope in resource.scope_spans for s in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def named(self) -> dict[str, Span]:
        """The spans of the client's trace."""
        mine = [(service, span) for service, span in self.spans if span.trace_id.hex() == TRACE]
        return {f"{service.removeprefix('dsv4pd-')} {span.name}": span for service, span in mine}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()


@pytest.fixture(scope="module")
def traced(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Cluster:
    flags = ("--otlp-endpoint", collector.url)
    cluster = Cluster(checkpoint, tmp_path_factory.mktemp("traced"), flags, flags, flags, with_router=True).start()
    try:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "look-for-me"}
        body = {"prompt": "x" * 700, "max_tokens": 8, "ignore_eos": True}
        answered = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)
        refused = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": "x", "frob": 1}, timeout=60)
    finally:
        statuses = cluster.stop()  # what waits to be sent is sent at the end
    assert (answered.status_code, refused.status_code, statuses) == (200, 400, [0, 0, 0])
    return cluster


def test_every_phase_has_a_span_in_the_clients_trace(traced: Cluster, collector: Collector):
    spans = collector.named()
    expected = {
        "router POST /v1/completions": PARENT,
        "router queue": "router POST /v1/completions",
        "router generate": "router POST /v1/completions",
        "decode dsv4pd.v1.Decode/Generate": "router generate",
        **{f"decode {phase}": "decode dsv4pd.v1.Decode/Generate" for phase in ("reserve", "prefill", "transfer", "admit", "decode")},
        "prefill dsv4pd.v1.Prefill/Prefill": "decode dsv4pd.v1.Decode/Generate",
        **{f"prefill {phase}": "prefill dsv4pd.v1.Prefill/Prefill" for phase in ("queue", "prefill", "transfer")},
    }  # fmt: skip
    assert set(spans) == set(expected)
    for name, parent in expected.items():
        wanted = parent if parent == PARENT else spans[parent].span_id.hex()
        assert spans[name].parent_span_id.hex() == wanted, name
        assert spans[name].end_time_unix_nano >= spans[name].start_time_unix_nano
        assert spans[name].status.code == Status.STATUS_CODE_UNSET, name


def test_phases_follow_each_other_and_stay_within_their_call(traced: Cluster, collector: Collector):
    spans = collector.named()
    phases = [spans[f"decode {name}"] for name in ("reserve", "prefill", "transfer", "admit", "decode")]
    for before, after in pairwise(phases):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    call = spans["decode dsv4pd.v1.Decode/Generate"]
    assert phases[-1].end_time_unix_nano <= call.end_time_unix_nano
    # Eight tokens and a prompt were computed: neither takes no time.
    for name in ("decode prefill", "decode decode", "prefill prefill"):
        assert spans[name].end_time_unix_nano - spans[name].start_time_unix_nano > 1_000_000, name


def test_the_requests_id_is_in_the_spans_and_logs_of_all_three(traced: Cluster, collector: Collector):
    calls = [s for _, s in collector.spans if s.kind == Span.SPAN_KIND_SERVER and s.trace_id.hex() == TRACE]
    ids = [a.value.string_value for s in calls for a in s.attributes if a.key == "request_id"]
    assert ids == ["look-for-me"] * 3
    assert traced.router is not None
    (line,) = [e for e in _log(traced.router.log) if e["event"] == "completion"]
    assert (line["request_id"], line["trace_id"]) == ("look-for-me", TRACE)
    for service in (traced.decode, traced.prefill):
        assert any(
            e.get("http_request_id") == "look-for-me" and e.get("trace_id") == TRACE for e in _log(service.log)
        ), service.name


def test_a_request_without_a_trace_begins_one(traced: Cluster, collector: Collector):
    (other,) = {s.trace_id.hex() for _, s in collector.spans} - {TRACE}
    spans = [s for _, s in collector.spans if s.trace_id.hex() == other]
    assert [(s.name, s.parent_span_id) for s in spans] == [("POST /v1/completions", b"")]
    assert {a.key: a.value.int_value for a in spans[0].attributes}["http.response.status_code"] == 400


def test_without_an_endpoint_the_sdk_is_not_even_loaded():
    code = (
        "import router_service.main, decode_service.spans, prefill_service.spans, sys; from common.tracing import Tracing;"
        "Tracing('router', '').close(); sys.exit(any(m.startswith('opentelemetry.sdk') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_collector_that_is_away_costs_no_request(checkpoint: Path, tmp_path: Path):
    flags = ("--otlp-endpoint", "http://127.0.0.1:1")
    cluster = Cluster(checkpoint, tmp_path, flags, flags, flags, with_router=True).start()
    body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).status_code == 200
    begun = time.monotonic()
    assert cluster.stop() == [0, 0, 0]
    assert time.monotonic() - begun < 40


def _log(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
