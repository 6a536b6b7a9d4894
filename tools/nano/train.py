"""The training loop of dsv4-nano: curriculum, indexer distillation, stages, logging, shards to resume from."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing import Value
from torch.utils.data import DataLoader, IterableDataset

from common.model.config import ModelConfig
from tools.nano.codec import Codec
from tools.nano.data import QUERIES, Batch, Text, recall_batch
from tools.nano.dense_model import DenseModel, Options

SHARD_BYTES = 12 << 20
TABLES_FILE = "tables.pt"


@dataclass(frozen=True)
class Plan:
    """One run. stage "base" learns the task, "long" stretches it with everything quantised as it is served."""

    stage: str
    seconds: float
    seed: int
    peak_lr: float
    step_tokens: int
    most_pairs: int
    device: str
    workers: int
    max_steps: int = 1 << 30
    start_pairs: int = 8


class _Batches(IterableDataset[Any]):
    """Alternates recall and text; `pairs` is the curriculum's present length, shared with the workers."""

    def __init__(self, plan: Plan, text: Text, codec: Codec, pairs: Any) -> None:
        self.plan, self.text, self.codec, self.pairs = plan, text, codec, pairs

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        worker = info.id if info else 0
        rng = np.random.default_rng(
            [self.plan.seed, worker, 17 if self.plan.stage == "long" else 0, self.plan.start_pairs]
        )
        while True:
            yield recall_batch(rng, self.codec, *self._size(rng), "cpu")
            length = min(1024, self.plan.step_tokens // 4)
            yield self.text.batch(rng, max(1, self.plan.step_tokens // 2 // length), length, "cpu")

    def _size(self, rng: np.random.Generator) -> tuple[int, int]:
        most = int(self.pairs.value)
        if self.plan.stage == "long":
            pairs = int(rng.choice([n for n in (60, 190, 400, 800, 1600) if n <= most] or [most]))
        else:
            pairs = most if rng.random() < 0.5 else int(rng.integers(8, most + 1))
        return max(1, int(self.plan.step_tokens / (self.codec.record_tokens * (pairs + QUERIES) + 8))), pairs


def train(model: DenseModel, plan: Plan, text: Text, codec: Codec, log_path: Path) -> None:
    """Trains in place until the time is over; appends JSON lines to the log."""
    pairs = Value("d", float(plan.start_pairs if plan.stage == "base" else plan.most_pairs))
    loader = DataLoader(_Batches(plan, text, codec, pairs), batch_size=None, num_workers=plan.workers,
                        prefetch_factor=2 if plan.workers else None, pin_memory=plan.device == "cuda")  # fmt: skip
    decayed = [p for n, p in model.weights.items() if p.dim() == 2 and "norm" not in n]
    rest = [p for n, p in model.weights.items() if not (p.dim() == 2 and "norm" not in n)]
    groups = [{"params": [*decayed, *model.previous.parameters()], "weight_decay": 0.01},
              {"params": rest, "weight_decay": 0.0}]  # fmt: skip
    optimiser = torch.optim.AdamW(groups, lr=plan.peak_lr, betas=(0.9, 0.98), fused=plan.device == "cuda")
    indexer = [p for n, p in model.weights.items() if "indexer" in n]
    chosen = {id(p) for p in indexer}
    others = [p for p in model.parameters() if id(p) not in chosen]
    recent: deque[float] = deque(maxlen=30)
    begun = time.monotonic()
    state: dict[str, float] = {}
    with log_path.open("a") as log:
        for step, batch in enumerate(loader):
            part = (time.monotonic() - begun) / plan.seconds
            if part >= 1 or step >= plan.max_steps:
                break
            rate = learning_rate(plan, step, part)
            for group in optimiser.param_groups:
                group["lr"] = rate
            model.options = options(plan, batch, part, step)
            loss, numbers = losses(model, batch, plan, part)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            # Clipped apart: the indexer's loss is large and would drown the gradients of everything else.
            norm = torch.nn.utils.clip_grad_norm_(others, 1.0)
            torch.nn.utils.clip_grad_norm_(indexer, 1.0)
            if torch.isfinite(norm):
                optimiser.step()
            else:
                state["skipped"] = state.get("skipped", 0) + 1
            state |= {k: float(v) for k, v in numbers.items()}
            if batch.digits is not None and plan.stage == "base":
                recent.append(state["digit_accuracy"])
                if len(recent) == 30 and sum(recent) / 30 > 0.93 and pairs.value < plan.most_pairs:
                    pairs.value = min(pairs.value * 1.5, plan.most_pairs)
                    recent.clear()
            if step % 20 < 2:
                state |= {"step": step, "seconds": round(time.monotonic() - begun, 1), "lr": rate, "pairs": pairs.value,
                          "length": batch.tokens.shape[1] - 1, "norm": float(norm), "topk": model.options.topk}  # fmt: skip
                log.write(json.dumps({"stage": plan.stage} | {k: round(v, 5) for k, v in state.items()}) + "\n")
                log.flush()
                if step % 100 < 2:
                    print({k: round(v, 4) for k, v in state.items()}, flush=True)
    model.options = Options()


def learning_rate(plan: Plan, step: int, part: float) -> float:
    """Warm-up over 200 steps, then flat until half of the time (base stage), then a cosine to 2 %."""
    warm = min(1.0, (step + 1) / (200 if plan.stage == "base" else 50))
    flat = 0.5 if plan.stage == "base" else 0.0
    down = max(0.0, (part - flat) / (1 - flat))
    return plan.peak_lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * down)))


def options(plan: Plan, batch: Batch, part: float, step: int) -> Options:
    long = plan.stage == "long"
    return Options(
        topk=64 if long or part > 0.75 else 0,
        quantise_kv=long or part > 0.75,
        quantise_weights=long,
        drop_c4=batch.digits is None and step % 20 == 1,
        checkpointed=batch.tokens.shape[1] > 3000,
    )


def losses(model: DenseModel, batch: Batch, plan: Plan, part: float) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = batch.tokens.to(plan.device, non_blocking=True)
    weight = batch.weight.to(plan.device, non_blocking=True)
    distil = plan.stage == "long" or part > 0.35
    asked = batch.asked.to(plan.device) if distil else None
    with torch.autocast(plan.device, torch.bfloat16, enabled=plan.device == "cuda"):
        hidden, index_loss, early = model(tokens[:, :-1], asked)
        rows, columns = weight.nonzero(as_tuple=True)
        logits = model.logits(hidden[rows, columns])
        targets, weights = tokens[rows, columns + 1], weight[rows, columns]
        each = F.cross_entropy(logits, targets, reduction="none")
        main = (each * weights).sum() / weights.sum()
        previous = _previous_loss(model, early, tokens[:, :-1])
    recall = batch.digits is not None
    aux = 0.25 if plan.stage == "base" and part < 0.5 else 0.025
    loss = main * (1.0 if recall else 0.5) + aux * previous + (index_loss if distil else 0)
    numbers = {"recall_loss" if recall else "text_loss": main.detach(), "previous_loss": previous.detach(),
               "index_loss": index_loss.detach()}  # fmt: skip
    if recall:
        digit = weights == 1
        numbers["digit_accuracy"] = ((logits.argmax(-1) == targets) & digit).sum() / digit.sum()
    return loss, numbers


def _previous_loss(model: DenseModel, early: Tensor, tokens: Tensor) -> Tensor:
    """A throw-away head on the rows behind block 0 names the last four tokens: without it the copying circuit
    that recall needs forms late or never."""
    places = torch.arange(8, tokens.shape[1], 5, device=tokens.device)
    made = model.previous(early[:, places]).float().unflatten(-1, (4, -1))
    targets = torch.stack([tokens[:, places - back] for back in range(1, 5)], -1)
    return F.cross_entropy(made.flatten(0, -2), targets.flatten())


def save_shards(model: DenseModel, folder: Path) -> None:
    """All parameters in fp32, in files of at most 12 MiB, and the hash routing tables: those are drawn from the
    seed and never trained, but the parameters are worth little with other ones."""
    flat = torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()])
    per = SHARD_BYTES // 4
    for index, begin in enumerate(range(0, flat.numel(), per)):
        torch.save(flat[begin : begin + per].clone(), folder / f"shard{index}.pt")
    torch.save(model.tables, folder / TABLES_FILE)


def load_shards(model: DenseModel, folder: Path) -> None:
    """Parameters and routing tables of `folder`. Exits when either is missing or of another model."""
    if not (folder / TABLES_FILE).exists():
        raise SystemExit(f"{folder} holds no {TABLES_FILE}: its parameters were trained with tables that are lost")
    shards = sorted(folder.glob("shard*.pt"), key=lambda p: int(p.stem[5:]))
    flat = torch.cat([torch.load(path, map_location="cpu") for path in shards])
    begin = 0
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(flat[begin : begin + p.numel()].view_as(p))
            begin += p.numel()
    if begin != flat.numel():
        raise SystemExit(f"{folder} holds {flat.numel()} values, the model has {begin}")
    tables = torch.load(folder / TABLES_FILE, map_location="cpu")
    if {k: v.shape for k, v in tables.items()} != {k: v.shape for k, v in model.tables.items()}:
        raise SystemExit(f"{folder / TABLES_FILE} holds {sorted(tables)}, the model has {sorted(model.tables)}")
    model.tables = tables


def nano_config(vocab_size: int = 260) -> dict[str, Any]:
    from common.model.small_checkpoint import small_config

    return small_config(
        vocab_size=vocab_size,
        hc_sinkhorn_iters=8,
        index_n_heads=8,
        max_position_embeddings=65536,
    )


def parsed_config(vocab_size: int = 260) -> ModelConfig:
    return ModelConfig.from_dict(nano_config(vocab_size))
