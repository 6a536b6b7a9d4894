"""`dsv4-pd`: starts one service, or all three.

Services are started as `python -m <package>` and never imported here: `common` knows no service.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from common.cli import admin, bench, evaluate, keys
from common.cli.plan import plan
from common.cli.up import UpSettings, run_up
from common.version import VERSION

app = typer.Typer(add_completion=False, no_args_is_help=True)
app.add_typer(evaluate.app, name="eval")
app.add_typer(bench.app, name="bench")
app.command()(plan)
app.add_typer(admin.app, name="admin")
app.add_typer(keys.app, name="keys")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def main() -> None:
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        print(VERSION)
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="prints the version")
    ] = False,
) -> None:
    """Disaggregated prefill and decode serving for DeepSeek-V4."""


def _become(package: str, flags: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", package, *flags])  # noqa: S606 - our own interpreter and module


@app.command(context_settings=_PASS_ON)
def prefill(context: typer.Context) -> None:
    """Runs the prefill service; its flags: dsv4-pd prefill --help."""
    _become("prefill_service", context.args)


@app.command(context_settings=_PASS_ON)
def decode(context: typer.Context) -> None:
    """Runs the decode service; its flags: dsv4-pd decode --help."""
    _become("decode_service", context.args)


@app.command(context_settings=_PASS_ON)
def router(context: typer.Context) -> None:
    """Runs the router; its flags: dsv4-pd router --help."""
    _become("router_service", context.args)


@app.command()
def doctor() -> None:
    """Says what this host can do (versions, GPU, RDMA, limits) and transfers to itself; 1 if something is bad."""
    from rich.console import Console

    from common.cli.doctor import examine

    console, bad = Console(highlight=False), False
    for finding in examine():
        mark = {"ok": "ok  ", "note": "note", "bad": "BAD "}[finding.state]
        console.print(f"{mark}  {finding.what:<12} {finding.detail}", markup=False, soft_wrap=True)
        bad = bad or finding.state == "bad"
    raise typer.Exit(1 if bad else 0)


@app.command()
def up(
    model: Annotated[Path | None, typer.Option(help="checkpoint directory; default: the shipped one")] = None,
    host: Annotated[str, typer.Option(help="address the router listens on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port of the router; 0 picks a free one")] = 8000,
    run_directory: Annotated[Path | None, typer.Option(help="where logs go; default: a temporary directory")] = None,
    logs: Annotated[bool, typer.Option("--logs", help="the services log here instead of into files")] = False,
    device: Annotated[str, typer.Option(help="where both workers compute: cpu, cuda or cuda:N")] = "cpu",
    prefill_flags: Annotated[str, typer.Option(help="flags for the prefill service, in one string")] = "",
    decode_flags: Annotated[str, typer.Option(help="flags for the decode service, in one string")] = "",
    router_flags: Annotated[str, typer.Option(help="flags for the router, in one string")] = "",
) -> None:
    """Starts prefill, decode and router on this machine and prints how to talk to them. Ctrl-C stops all."""
    settings = UpSettings(model, host, port, run_directory, logs, device, prefill_flags, decode_flags, router_flags)
    raise typer.Exit(run_up(settings))
