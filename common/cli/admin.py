"""`dsv4-pd admin`: every Admin call on a worker, as a table or, with --json, as the reply itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, RenderableType

from common.cli import admin_tables
from common.rpc.channels import open_blocking_channel
from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc
from common.rpc.tls import Tls

app = typer.Typer(no_args_is_help=True, help="Looks into a prefill or decode worker and operates it.")
DEFAULT_ADDRESS = "127.0.0.1:7002"
TOKEN_VARIABLE = "DSV4PD_ADMIN_TOKEN"  # noqa: S105 - its name
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class _Target:
    """Which worker, how to be let in, how to show what it says."""

    address: str
    tls: Tls | None
    token: str
    as_json: bool


@app.callback()
def target(
    context: typer.Context,
    address: Annotated[str, typer.Option(help="host:port of the worker's gRPC")] = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="prints the reply as JSON")] = False,
    token_file: Annotated[Path | None, typer.Option(help=f"file with the admin token; or ${TOKEN_VARIABLE}")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="certificate of the authority, PEM")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="our certificate, PEM")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="our key, PEM")] = None,
) -> None:
    try:
        tls = Tls.load(tls_ca, tls_cert, tls_key)
        token = token_file.read_text(encoding="utf-8").strip() if token_file else os.environ.get(TOKEN_VARIABLE, "")
    except (ValueError, OSError) as error:
        _fail(str(error), 2)
    context.obj = _Target(address, tls, token, as_json)


@app.command()
def status(
    context: typer.Context,
    check_integrity: Annotated[bool, typer.Option("--check-integrity", help="also walks every pool")] = False,
) -> None:
    """Pools, queues, counters, versions."""
    request = admin_pb2.GetStatusRequest(check_integrity=check_integrity)
    _call(context, "GetStatus", request, admin_tables.status)


@app.command()
def requests(context: typer.Context) -> None:
    """The requests that are on the worker."""
    _call(context, "ListRequests", admin_pb2.ListRequestsRequest(), admin_tables.requests)


@app.command()
def abort(context: typer.Context, request_id: Annotated[str, typer.Argument(help="exact id, see requests")]) -> None:
    """Ends one request."""
    request = admin_pb2.AbortRequestRequest(request_id=request_id)
    _call(context, "AbortRequest", request, admin_tables.aborted)


@app.command()
def drain(
    context: typer.Context,
    grace_s: Annotated[float, typer.Option(min=0, help="longest wait for running requests; 0 = for ever")] = 0,
) -> None:
    """Takes no new requests and waits for the running ones."""
    request = admin_pb2.DrainRequest(grace_s=grace_s)
    _call(context, "Drain", request, admin_tables.drained, timeout_s=None)


@app.command()
def resume(context: typer.Context) -> None:
    """Takes a drain back."""
    _call(context, "Resume", admin_pb2.ResumeRequest(), admin_tables.resumed)


@app.command()
def flush_cache(context: typer.Context) -> None:
    """Frees pages that no request uses."""
    request = admin_pb2.FlushCacheRequest()
    _call(context, "FlushCache", request, admin_tables.flushed)


@app.command()
def layout(context: typer.Context) -> None:
    """What both sides of a handover must agree on."""
    _call(context, "GetLayout", admin_pb2.GetLayoutRequest(), admin_tables.layout)


@app.command()
def log_level(
    context: typer.Context, level: Annotated[str, typer.Argument(help="debug, info, warning, error")]
) -> None:
    """Changes the least severe level that is logged."""
    request = admin_pb2.SetLogLevelRequest(level=level)
    _call(context, "SetLogLevel", request, admin_tables.log_level)


@app.command()
def start_profile(
    context: typer.Context,
    duration_s: Annotated[float, typer.Option(min=0, help="0 = until stop-profile")] = 0,
) -> None:
    """Starts a torch profile."""
    request = admin_pb2.StartProfileRequest(duration_s=duration_s)
    _call(context, "StartProfile", request, admin_tables.profile_started)


@app.command()
def stop_profile(context: typer.Context) -> None:
    """Ends the profile and says where its trace is."""
    request = admin_pb2.StopProfileRequest()
    _call(context, "StopProfile", request, admin_tables.profile_stopped, TIMEOUT_S * 4)


def _call(
    context: typer.Context,
    method: str,
    request: Message,
    show: Callable[[Any], RenderableType],
    timeout_s: float | None = TIMEOUT_S,
) -> None:
    """Prints the reply; a failed call is one line on standard error and status 1."""
    to: _Target = context.obj
    metadata = (("authorization", f"Bearer {to.token}"),) if to.token else ()
    with open_blocking_channel(to.address, to.tls) as channel:
        try:
            call = getattr(admin_pb2_grpc.AdminStub(channel), method)
            reply = call(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            code, details = (error.code(), error.details()) if isinstance(error, grpc.Call) else ("", error)
            _fail(f"{to.address}: {getattr(code, 'name', code)}: {details}", 1)
    if to.as_json:
        shown = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        print(json.dumps(shown, indent=2))
    else:
        Console().print(show(reply), highlight=False)


def _fail(message: str, status: int) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)
