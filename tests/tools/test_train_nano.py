"""Training in miniature: the loss falls, runs resume, and what is exported loads."""

import dataclasses
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from common.evaluation.recall import WINDOW_CHARACTERS
from common.model.checkpoint import load_weights
from common.model.config import ModelConfig
from common.model.model import DeepSeekV4Model, PrefillChunk
from common.model.quantised_weight import QuantisedWeight
from tests.model.oracle import transformers_model
from tests.support.local_kv import LocalSequence
from tools.nano.codec import BYTE_TOKENIZER, EOS, Codec, train_bpe
from tools.nano.data import Text, recall_batch
from tools.nano.dense_model import DenseModel, Options
from tools.nano.train import Plan, load_shards, parsed_config, save_shards, train
from tools.train_nano import export

BYTES = Codec(BYTE_TOKENIZER)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    path = tmp_path_factory.mktemp("corpus") / "text.xz"
    path.write_bytes(lzma.compress(b"\0".join([Path(__file__).read_bytes() * 40] * 3)))
    return Text(path, BYTES)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(iter([Path(__file__).read_text()]), 400, path)
    return Codec(path)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_questions_ask_for_records_with_their_own_values(kind: str, bpe: Codec):
    codec = bpe if kind == "bpe" else BYTES
    batch = recall_batch(np.random.default_rng(0), codec, 3, 40, "cpu")
    assert batch.digits is not None
    for row in range(3):
        tokens = batch.tokens[row].tolist()
        content = codec.decode(tokens[: tokens.index(EOS)])
        assert tokens[: tokens.index(EOS)] == codec.encode(content)  # as a prompt is read
        records = dict(line.split("=") for line in content.split("\n") if "=" in line)
        records = {key[-4:]: value for key, value in records.items()}
        asked = [line.split("?") for line in content.split("\n") if "?" in line]
        assert len(asked) == 24
        assert all(records[key] == value for key, value in asked)
        for query, places in enumerate(batch.digits[row].tolist()):
            assert codec.decode([tokens[place + 1] for place in places]) == asked[query][1]
            assert batch.weight[row, places].eq(1).all()
        assert int(batch.weight[row].eq(1).sum()) == 96
        first = content.index(f"{asked[0][0]}={asked[0][1]}")
        assert content.index("?") - first >= WINDOW_CHARACTERS


def test_a_bpe_keeps_digits_and_marks_apart_and_knows_its_bytes(bpe: Codec):
    sentence = "def read(x):\n    return x == 1234 or x?\n"
    tokens = bpe.encode(sentence)
    assert len(tokens) < len(sentence)
    assert bpe.decode(tokens) == sentence
    assert int(bpe.byte_lengths[tokens].sum()) == len(sentence.encode())
    assert bpe.byte_lengths[EOS] == 0
    assert BYTES.record_tokens == 10


def test_a_short_run_learns_exports_and_resumes(tmp_path: Path, text: Text):
    torch.manual_seed(0)
    model = DenseModel(parsed_config(), 0)
    plan = Plan("base", 1e9, 0, 3e-3, 600, 12, "cpu", 0, max_steps=2)
    rng = np.random.default_rng(9)
    probe = text.batch(rng, 2, 128, "cpu")

    def loss() -> float:
        with torch.no_grad():
            hidden, _, _ = model(probe.tokens[:, :-1])
            return float(
                torch.nn.functional.cross_entropy(model.logits(hidden).flatten(0, 1), probe.tokens[:, 1:].flatten())
            )

    before = loss()
    for seed in range(3):
        train(
            model,
            Plan(**{**plan.__dict__, "max_steps": 12, "seed": seed, "stage": "base" if seed < 2 else "long"}),
            text,
            BYTES,
            tmp_path / "log.jsonl",
        )
    assert loss() < before - 0.3
    assert (tmp_path / "log.jsonl").read_text().count("\n") >= 4
    save_shards(model, tmp_path)
    again = DenseModel(parsed_config(), 1)
    load_shards(again, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(again.tables[name], table) for name, table in model.tables.items())
    export(model, BYTES, tmp_path / "export")
    assert (tmp_path / "export" / "tokenizer.json").read_bytes() == BYTE_TOKENIZER.read_bytes()
    config = ModelConfig.from_file(tmp_path / "export")
    engine = DeepSeekV4Model(config, load_weights(tmp_path / "export", config))
    tokens = probe.tokens[0, :100]
    (logits,) = engine.prefill([PrefillChunk(tokens, LocalSequence(config, quantise=False), "all")])
    model.options = Options(quantise_weights=True)
    with torch.no_grad():
        expected = model.logits(model(tokens[None])[0])[0]
    assert logits is not None
    # The embedding, head and compressors are exported in BF16, which may turn a near tie between experts around.
    difference = (logits - expected).abs().amax(-1)
    assert difference.median() < 0.05
    assert (difference < 0.1).float().mean() > 0.9


def test_shards_without_their_routing_tables_are_refused(tmp_path: Path):
    """Parameters resumed with tables of another seed answered 0.45 of questions instead of 0.98, unnoticed."""
    model = DenseModel(parsed_config(), 0)
    save_shards(model, tmp_path)
    (tmp_path / "tables.pt").unlink()
    with pytest.raises(SystemExit, match="tables"):
        load_shards(model, tmp_path)


SHIPPED = Path(__file__).resolve().parents[2] / "models" / "dsv4-nano"


def _unpacked(folder: Path) -> dict[str, Tensor]:
    """The checkpoint's values in fp32, tables as int64."""
    loaded = load_weights(folder, ModelConfig.from_file(folder))
    dense = {k: v.dequantise() if isinstance(v, QuantisedWeight) else v for k, v in loaded.items()}
    return {k: v.float() if v.is_floating_point() else v.long() for k, v in dense.items()}


def test_transformers_finds_every_tensor_of_the_shipped_checkpoint(tmp_path: Path):
    """Unpacked, since transformers reads FP8 blocks only where `accelerate` is installed."""
    config = json.loads((SHIPPED / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.contiguous() for name, tensor in _unpacked(SHIPPED).items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    _, found = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert not found["mismatched_keys"]


def test_the_trained_form_and_transformers_agree_on_the_shipped_checkpoint():
    """Every entry is attended to, so that no tie between index scores can decide."""
    config = dataclasses.replace(ModelConfig.from_file(SHIPPED), index_topk=150)
    weights = _unpacked(SHIPPED)
    model = DenseModel(config, 0)
    model.tables = {name: weights[name] for name in model.tables}
    tokens = torch.randint(4, config.vocab_size, (1, 600), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for key, parameter in model.weights.items():
            parameter.copy_(weights[key.replace("/", ".")])
        ours = model.logits(model(tokens)[0])
        theirs = transformers_model(config, weights)(tokens, use_cache=False).logits
    assert (ours - theirs).abs().max() < 1e-3
