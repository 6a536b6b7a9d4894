"""Replies of the Admin service as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.rpc.gen.dsv4pd.v1 import admin_pb2, common_pb2

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def status(reply: admin_pb2.GetStatusReply) -> RenderableType:
    state = "draining" if reply.draining else "ready" if reply.ready else "not ready"
    facts = [
        ("service", reply.incarnation.service),
        ("state", state),
        ("version", reply.version),
        ("model", reply.model_name),
        ("longest context", f"{reply.max_context_tokens:,} tokens"),
        ("incarnation", reply.incarnation.id),
        ("mooncake", reply.mooncake_session),
    ]
    pools = _table(
        "pools",
        ("name", "total", "used", "free", "cached", "quarantined", "item", "in all"),
        (
            (
                p.name,
                _count(p.total),
                _count(p.used),
                _count(p.free),
                _count(p.cached),
                _count(p.quarantined),
                _bytes(p.item_bytes),
                _bytes(p.total * p.item_bytes),
            )
            for p in reply.pools
        ),
    )
    phases = _table(
        "requests",
        ("phase", "requests", "tokens"),
        ((p.phase, _count(p.requests), _count(p.tokens)) for p in reply.phases),
    )
    counters = _table("counters", ("name", "value"), ((k, f"{v:,.0f}") for k, v in sorted(reply.counters.items())))
    return Group(_facts(facts), pools, phases, counters)


def requests(reply: admin_pb2.ListRequestsReply) -> RenderableType:
    if not reply.requests:
        return "no requests"
    return _table(
        "",
        ("request", "phase", "prompt", "generated", "of", "age", "host pages", "logical pages", "peer"),
        (
            (
                r.key.request_id,
                r.phase,
                _count(r.prompt_tokens),
                _count(r.generated_tokens),
                _count(r.max_tokens),
                f"{r.age_s:.1f} s",
                _count(r.host_pages),
                _count(r.logical_pages),
                r.peer,
            )
            for r in reply.requests
        ),
    )


def layout(reply: admin_pb2.GetLayoutReply) -> RenderableType:
    facts = [(field.name, str(value)) for field, value in reply.layout.ListFields() if field.name != "layers"]
    ratios: dict[int, list[int]] = {}
    for layer in reply.layout.layers:
        ratios.setdefault(layer.ratio, []).append(layer.layer_id)
    facts += [(f"layers of ratio {ratio}", ", ".join(map(str, ids))) for ratio, ids in sorted(ratios.items())]
    if not reply.regions:
        return _facts(facts)
    regions = _table(
        "registered regions",
        ("layer", "kind", "items", "item", "bytes"),
        (
            (
                str(r.layer_id),
                common_pb2.RegionKind.Name(r.kind).removeprefix("REGION_KIND_").lower(),
                _count(r.bytes // r.item_bytes if r.item_bytes else 0),
                _bytes(r.item_bytes),
                _bytes(r.bytes),
            )
            for r in reply.regions
        ),
    )
    return Group(_facts(facts), regions)


def aborted(reply: admin_pb2.AbortRequestReply) -> str:
    return f"aborted: {reply.aborted}"


def drained(reply: admin_pb2.DrainReply) -> str:
    return f"still running: {reply.running}"


def resumed(_: admin_pb2.ResumeReply) -> str:
    return "takes requests again"


def flushed(reply: admin_pb2.FlushCacheReply) -> str:
    return f"pages freed: {reply.pages_freed}"


def log_level(reply: admin_pb2.SetLogLevelReply) -> str:
    return f"it was {reply.previous}"


def profile_started(reply: admin_pb2.StartProfileReply) -> str:
    return f"profile {reply.profile_id} runs"


def profile_stopped(reply: admin_pb2.StopProfileReply) -> str:
    return f"written to {reply.path}"


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """The first column to the left, numbers to the right; what workers say is no markup."""
    table = Table(title=title or None, title_justify="left", title_style="bold")
    texts = ("name", "phase", "request", "peer", "kind")
    for column in columns:
        table.add_column(column, justify="left" if column in texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _count(number: int) -> str:
    return f"{number:,}"


def _bytes(number: float) -> str:
    unit = 0
    while number >= 1024 and unit < len(_UNITS) - 1:
        number /= 1024
        unit += 1
    return f"{number:.0f} {_UNITS[unit]}" if unit == 0 else f"{number:.1f} {_UNITS[unit]}"
