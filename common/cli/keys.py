"""`dsv4-pd keys`: makes secrets for the router's file of API keys and for the workers' admin role."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Makes API keys and admin tokens; nothing is stored.")


def _show(secret: str, entry: str, where: str) -> None:
    """The secret alone goes to standard output last, so that a script can take the last line."""
    note = Console(stderr=True)
    note.print(f"put this into {where}:", style="green")
    note.print(entry, markup=False, highlight=False, soft_wrap=True)
    note.print("the secret, shown this once:", style="green")
    print(secret)


def _made(prefix: str) -> tuple[str, str]:
    secret = f"{prefix}-{secrets.token_urlsafe(32)}"
    return secret, hashlib.sha256(secret.encode()).hexdigest()


@app.command()
def new(name: Annotated[str, typer.Argument(help="who the key is for; shown in logs")]) -> None:
    """Makes an API key and its entry for the router's file (--api-keys)."""
    secret, digest = _made("sk")
    quoted = json.dumps(name)  # a TOML basic string too
    _show(secret, f'[[key]]\nname = {quoted}\nsha256 = "{digest}"', "the router's file of keys")


@app.command()
def admin_token() -> None:
    """Makes an admin token and its setting for the workers."""
    secret, digest = _made("adm")
    _show(secret, f"--admin-token-sha256 {digest}", "the workers' settings")
