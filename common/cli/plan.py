"""`dsv4-pd plan`: what fits a machine, by the arithmetic that the services use."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from common.kv.footprint import Footprint
from common.kv.sizing import DEVICE_RESERVE_BYTES, HOST_RESERVE_BYTES, free_budget, lengths_up_to
from common.model.config import ConfigError, ModelConfig
from common.model.plan import plan_model, rank_bytes
from common.model.public_configs import FLASH, PRO
from common.quantities import parse_bytes, parse_tokens, show_bytes, show_tokens

# Memory of GPUs that people have, in bytes.
GPUS = {"h100": 80 << 30, "h200": 141 * 10**9, "b200": 180 * 10**9, "a100": 80 << 30, "l40s": 48 << 30}
PUBLIC = {"flash": FLASH, "pro": PRO}
RANKS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Fit:
    """Requests of `tokens` tokens that a decode worker holds at a time, with HiSparse and with all KV on the device."""

    tokens: int
    hisparse: int
    resident: int
    host_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class Plan:
    """Bytes. `weights` of one rank; `host_budget` and `device_budget` are what is left for KV."""

    model: str
    ranks: int
    weights: int
    weights_by_ranks: dict[int, int]
    footprint: Footprint
    host_budget: int
    device_budget: int
    fits: tuple[Fit, ...]


def make_plan(
    name: str, config: ModelConfig, host_memory: int, device_memory: int, ranks: int, hot_entries: int, tokens: int
) -> Plan:
    """Raises ValueError when the weights alone don't fit the device."""
    weights = rank_bytes(config, ranks)
    device_budget = free_budget(device_memory, device_memory - weights, DEVICE_RESERVE_BYTES)
    if device_budget <= 0:
        raise ValueError(
            f"{name}: weights of one of {ranks} ranks are {show_bytes(weights)}; with a reserve of "
            f"{show_bytes(min(DEVICE_RESERVE_BYTES, device_memory // 4))} they don't fit {show_bytes(device_memory)}"
        )
    host_budget = free_budget(host_memory, host_memory, HOST_RESERVE_BYTES)
    footprint = Footprint.of(config.compress_ratios, hot_entries)
    fits = tuple(
        Fit(
            n,
            footprint.most_requests(n, host_budget, device_budget),
            footprint.most_resident(n, device_budget),
            footprint.host_bytes(n),
            footprint.device_bytes(n),
        )
        for n in lengths_up_to(tokens)
    )
    by_ranks = {count: rank_bytes(config, count) for count in RANKS}
    return Plan(name, ranks, weights, by_ranks, footprint, host_budget, device_budget, fits)


def read_config(model: str) -> tuple[str, ModelConfig]:
    """ "flash", "pro" or a checkpoint's directory. Raises ValueError."""
    if model in PUBLIC:
        return model, ModelConfig.from_dict(PUBLIC[model])
    path = Path(model)
    if not (path / "config.json").exists():
        raise ValueError(f"model {model!r} is neither {', '.join(PUBLIC)} nor a directory with a config.json")
    return path.resolve().name, ModelConfig.from_file(path)


def read_gpu(gpu: str) -> int:
    return GPUS[gpu.lower()] if gpu.lower() in GPUS else parse_bytes(gpu)


def plan(
    model: Annotated[str, typer.Option(help="flash, pro, or a checkpoint's directory")] = "flash",
    context: Annotated[str, typer.Option(help="tokens of a request, prompt and output: 256k, 1m")] = "1m",
    host_mem: Annotated[str, typer.Option(help="memory of the host for one decode worker: 512GB, 1TB")] = "1TB",
    gpu: Annotated[str, typer.Option(help=f"{', '.join(GPUS)}, or bytes: 96GB")] = "h200",
    ranks: Annotated[int, typer.Option(min=1, help="GPUs that share the weights")] = 8,
    hot_entries: Annotated[int, typer.Option(min=0, help="hot buffer rows; 0 = 4 x index_topk")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """Prints how many requests of which length fit, by the arithmetic that the services use."""
    try:
        name, config = read_config(model)
        tokens = parse_tokens(context)
        if not 0 < tokens <= config.max_positions:
            raise ValueError(f"context = {context!r}: the model has {config.max_positions} positions")
        entries = hot_entries or 4 * config.index_topk
        if entries < config.index_topk:
            raise ValueError(f"hot_entries = {entries} is less than the model's index_topk = {config.index_topk}")
        made = make_plan(name, config, parse_bytes(host_mem), read_gpu(gpu), ranks, entries, tokens)
    except (ValueError, ConfigError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(asdict(made)))
    else:
        _show(made, plan_model(config).parameters, entries, gpu, host_mem)


def _show(made: Plan, parameters: int, entries: int, gpu: str, host_mem: str) -> None:
    console = Console()
    per = made.footprint
    size = show_bytes(made.weights)
    console.print(
        f"{made.model}: {parameters / 1e9:.1f} B parameters; one of {made.ranks} ranks holds {size} as they are stored"
    )
    console.print("weights a rank: " + ", ".join(f"{n}: {show_bytes(b)}" for n, b in made.weights_by_ranks.items()))
    console.print(
        f"a token: host {per.host_page / 256:.0f} B, device {per.logical_page / 256:.0f} B; a request besides: "
        f"{show_bytes(per.slots)} ({entries} hot rows)"
    )
    left = (show_bytes(made.host_budget), show_bytes(made.device_budget))
    console.print(f"left for KV: host {left[0]} of {host_mem}, device {left[1]} of {gpu}")
    rows: list[tuple[Any, ...]] = [
        (show_tokens(f.tokens), f.hisparse, f.resident, show_bytes(f.host_bytes), show_bytes(f.device_bytes))
        for f in made.fits
    ]
    table = Table("tokens", "requests", "without HiSparse", "host each", "device each")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)
