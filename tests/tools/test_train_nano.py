"""The trainer of dsv4-nano, much smaller than it is run: its loss falls, and what it exports is the model it trained."""

from __future__ import annotations

import dataclasses
import json
import lzma
import random
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from common.evaluation.recall import RECORD_CHARACTERS, WINDOW_CHARACTERS, make_question
from common.model.checkpoint import load_weights
from common.model.config import ModelConfig
from common.model.quantised_weight import QuantisedWeight
from tests.model.oracle import transformers_model
from tools.nano.data import Text
from tools.nano.dense_model import DenseModel, Options
from tools.nano.train import Plan, load_shards, parsed_config, save_shards, train
from tools.train_nano import export

PROMPT_TOKENS = 600
STEPS = 12


@dataclasses.dataclass(frozen=True)
class Smoke:
    model: DenseModel
    folder: Path  # shards and log
    exported: Path
    loss_before: float
    loss_after: float


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    folder = tmp_path_factory.mktemp("nano")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    sources = [(stdlib / name).read_bytes() for name in ("argparse.py", "ast.py", "asyncio/tasks.py", "csv.py")]
    (folder / "text.xz").write_bytes(lzma.compress(b"\0".join(sources)))
    text = Text(folder / "text.xz")
    plan = Plan(
        stage="base", seconds=1e6, seed=0, peak_lr=1.5e-3, step_tokens=1024, most_pairs=8, device="cpu", workers=0,
        max_steps=STEPS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = DenseModel(parsed_config(), seed=0)
    before = _held_out_loss(model, text)
    train(model, plan, text, folder / "training_log.jsonl")
    after = _held_out_loss(model, text)
    save_shards(model, folder)
    exported = folder / "exported"
    export(model, exported)
    return Smoke(model, folder, exported, before, after)


@torch.no_grad()
def _held_out_loss(model: DenseModel, text: Text) -> float:
    """Cross-entropy on the few held-out tokens that a smoke run can afford."""
    tokens = torch.from_numpy(text.held_out[:513])[None]
    logits = model.logits(model(tokens[:, :-1])[0])
    return float(torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]))


def _dense(weights: dict[str, QuantisedWeight | Tensor]) -> dict[str, Tensor]:
    return {k: v.dequantise() if isinstance(v, QuantisedWeight) else _widened(v) for k, v in weights.items()}


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def test_the_loss_falls_and_is_logged(smoke: Smoke) -> None:
    assert smoke.loss_after < smoke.loss_before - 0.5
    lines = [json.loads(line) for line in (smoke.folder / "training_log.jsonl").read_text().splitlines()]
    assert lines[0]["step"] == 0
    assert {"recall_loss", "lr", "pairs", "digit_accuracy"} <= lines[0].keys()


def test_shards_bring_back_every_parameter(smoke: Smoke) -> None:
    other = DenseModel(parsed_config(), seed=1)
    load_shards(other, smoke.folder)
    assert all(torch.equal(a, b) for a, b in zip(smoke.model.parameters(), other.parameters(), strict=True))


def test_an_exported_checkpoint_fits_in_git(smoke: Smoke) -> None:
    assert (smoke.exported / "model.safetensors").stat().st_size < 16_000_000


def test_transformers_finds_each_native_tensor(smoke: Smoke, tmp_path: Path) -> None:
    """Unpacked, since transformers reads FP8 blocks only where `accelerate` is installed."""
    config = json.loads((smoke.exported / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = _dense(load_weights(smoke.exported, ModelConfig.from_file(smoke.exported)))
    save_file({k: v.contiguous() for k, v in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    _, found = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert not found["mismatched_keys"]


def test_the_exported_weights_give_the_same_logits_in_transformers(smoke: Smoke) -> None:
    """Every entry attended to, so that no tie in the indexer can decide."""
    config = dataclasses.replace(ModelConfig.from_file(smoke.exported), index_topk=PROMPT_TOKENS // 4)
    weights = _dense(load_weights(smoke.exported, config))
    model = DenseModel(config, seed=2)
    with torch.no_grad():
        for key, parameter in model.weights.items():
            parameter.copy_(weights[key.replace("/", ".")])
    model.tables = {name: weights[name] for name in model.tables}
    tokens = torch.randint(4, config.vocab_size, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours = model.logits(model(tokens)[0])
        theirs = transformers_model(config, weights)(tokens, use_cache=False).logits
    assert (ours - theirs).abs().max() < 1e-3


def test_fp8_training_sees_exactly_the_exported_matrices(smoke: Smoke) -> None:
    weights = _dense(load_weights(smoke.exported, ModelConfig.from_file(smoke.exported)))
    smoke.model.options = Options(quantise_weights=True)
    for key in smoke.model.quantised:
        name = key.replace("/", ".")
        assert torch.equal(smoke.model.w(name).detach(), weights[name]), name
    smoke.model.options = Options()


@pytest.mark.parametrize("characters", [160, 1000, 4001, 16000])
def test_a_question_asks_for_a_record_outside_the_window(characters: int) -> None:
    question = make_question(random.Random(characters), characters)
    key = question.prompt[-5:-1]
    assert characters - 9 <= len(question.prompt) <= characters
    place = question.prompt.index(f"{key}={question.answer}\n")
    assert len(question.prompt) - place >= WINDOW_CHARACTERS + RECORD_CHARACTERS - 10
    assert question.prompt.count(f"{key}=") == 1
