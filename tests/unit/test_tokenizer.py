"""Tokens and bytes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common.model.config import ConfigError, ModelConfig
from common.model.small_checkpoint import small_config
from common.model.tokenizer import ByteTokenizer, decode, load_tokenizer

CONFIG = ModelConfig.from_dict(small_config())
BYTES = ByteTokenizer(CONFIG)


def bpe(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello hello world, héllo wörld " * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


@given(st.text())
def test_bytes_come_back_as_the_same_text(text: str):
    text = text.encode("utf-8", "ignore").decode()
    assert decode(BYTES, BYTES.encode(text)) == text


def test_special_ids_are_below_the_bytes_and_stand_for_no_text():
    assert BYTES.encode("\x00\xff") == [4, 4 + 0xC3, 4 + 0xBF]
    assert [BYTES.is_special(token) for token in (0, 1, 3, 4)] == [True, True, True, False]
    assert BYTES.id_to_bytes(1) == b""
    assert BYTES.token_text(1) == "<eos>"


def test_tokens_that_are_no_text_are_spelled_apart():
    assert BYTES.token_text(4 + 0xC3) == "bytes:\\xc3"
    assert BYTES.token_text(4 + ord("a")) == "a"


def test_a_byte_level_bpe_gives_bytes_whose_concatenation_is_the_text(tmp_path: Path):
    bpe(tmp_path)
    config = ModelConfig.from_dict(small_config(vocab_size=320))
    tokenizer = load_tokenizer(tmp_path, config)
    text = "hello wörld ✓ 🎉\n\ttabs"
    tokens = tokenizer.encode(text)
    assert len(tokens) < len(text.encode())
    assert b"".join(tokenizer.id_to_bytes(token) for token in tokens).decode() == text
    assert tokenizer.is_special(1)
    assert tokenizer.id_to_bytes(1) == b""
    assert tokenizer.hash != BYTES.hash


def test_vocabularies_that_do_not_fit_are_refused(tmp_path: Path):
    bpe(tmp_path)
    with pytest.raises(ConfigError, match=r"has 275 tokens, config.json's vocab_size is 260"):
        load_tokenizer(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match="leaves no room for 256 bytes"):
        ByteTokenizer(ModelConfig.from_dict(small_config(vocab_size=257)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="can't be read"):
        load_tokenizer(tmp_path, CONFIG)
