"""Trains dsv4-nano and exports it in DeepSeek's native format.

    python -m tools.nano.corpus --out .nano/text.xz
    python -m tools.train_nano --stage base --text .nano/text.xz --out .nano/base --time-budget-s 500
    python -m tools.train_nano --stage long --text .nano/text.xz --resume .nano/base --out .nano/long \
        --time-budget-s 350 --export models/dsv4-nano

It trains our own dense form (tools/nano/dense_model.py) rather than transformers': with its Sinkhorn loop compiled,
block-wise windows and logits only where a loss needs them, a step costs a fraction, and fake quantisation of weights
and KV is part of it. `tests/tools` holds that the exported checkpoint gives the same logits in transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path

# Loader workers are forked and tokenize; threads of the tokenizer that were started before would deadlock there.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from safetensors.torch import save_file

from common.model.small_checkpoint import stored_tensors
from common.model.weight_names import expected_weights
from tools.nano import dense_model
from tools.nano.codec import BYTE_TOKENIZER, Codec
from tools.nano.data import Text
from tools.nano.dense_model import DenseModel
from tools.nano.evaluate import continuations, exact_match, text_loss
from tools.nano.train import Plan, load_shards, nano_config, parsed_config, save_shards, train


def export(model: DenseModel, codec: Codec, folder: Path) -> None:
    """config.json, tokenizer.json and model.safetensors: FP8 blocks for the matrices, BF16 and FP32 for the rest."""
    config = parsed_config(codec.vocab_size)
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in expected_weights(config).items():
        table = model.tables.get(name)
        weight = table if table is not None else model.weights[name.replace(".", "/")].detach().float().cpu()
        tensors |= stored_tensors(name, weight, spec, "fp8")
    data = nano_config(codec.vocab_size) | {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n")
    if codec.path.resolve() != (folder / "tokenizer.json").resolve():
        shutil.copy(codec.path, folder / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=["base", "long"], required=True)
    parser.add_argument("--text", type=Path, required=True, help="made by tools/nano/corpus.py")
    parser.add_argument("--tokenizer", type=Path, default=BYTE_TOKENIZER, help="default: plain bytes")
    parser.add_argument("--out", type=Path, required=True, help="for parameter shards and the log")
    parser.add_argument("--resume", type=Path, help="folder with parameter shards to begin from")
    parser.add_argument("--export", type=Path, help="folder for the checkpoint in the native format")
    parser.add_argument("--time-budget-s", type=float, default=500)
    parser.add_argument("--max-steps", type=int, default=1 << 30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--step-tokens", type=int, default=65536)
    parser.add_argument("--most-pairs", type=int)
    parser.add_argument("--workers", type=int, default=min(10, max(0, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--compile", action="store_true", help="faster steps after some 100 s; for long runs")
    parser.add_argument("--start-pairs", type=int, default=8)
    parser.add_argument("--evaluate", type=int, nargs="*", default=[], help="prompt lengths in characters")
    parser.add_argument("--evaluate-n", type=int, default=200)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    if options.compile:
        for name in ("_hyper", "_spread"):
            setattr(dense_model, name, torch.compile(getattr(dense_model, name), dynamic=True))
    base = options.stage == "base"
    plan = Plan(
        stage=options.stage,
        seconds=options.time_budget_s,
        seed=options.seed,
        peak_lr=options.lr or (1.5e-3 if base else 4e-4),
        step_tokens=options.step_tokens,
        most_pairs=options.most_pairs or (190 if base else 1600),
        device=device,
        workers=options.workers,
        max_steps=options.max_steps,
        start_pairs=options.start_pairs,
    )
    codec = Codec(options.tokenizer)
    model = DenseModel(parsed_config(codec.vocab_size), options.seed).to(device)
    print(f"{sum(p.numel() for p in model.weights.values())} parameters on {device}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.resume:
        load_shards(model, options.resume)
    text = Text(options.text, codec)
    train(model, plan, text, codec, options.out / "training_log.jsonl")
    save_shards(model, options.out)
    if options.export:
        export(model, codec, options.export)
    results = {"text_loss": text_loss(model, text, codec, device), "time": time.strftime("%Y-%m-%d"), "recall": []}
    print("text loss, nats a byte:", results["text_loss"], flush=True)
    for context in options.evaluate:
        found = exact_match(model, codec, context, options.evaluate_n, device)
        print(found, flush=True)
        results["recall"].append(found)
    if options.evaluate:
        results["continuations"] = continuations(model, codec, 200, 0.6, device)
        for prompt, written in results["continuations"].items():
            print(f"--- {prompt}{written}", flush=True)
    (options.out / "evaluation.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
