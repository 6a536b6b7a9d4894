"""How training text becomes token ids: plain bytes, or a byte-level BPE that keeps digits and record marks apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = 0, 1
BYTE_OFFSET = 4
BYTE_TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "dsv4-nano" / "tokenizer.json"


class Codec:
    """A tokenizer.json with ids 0 = beginning, 1 = end of sequence; `=`, `?`, newline and each digit must be tokens of
    their own. Raises ValueError where one of them is not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tokenizer = Tokenizer.from_file(str(path))
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.newline, self.equals, self.question = (self._single(mark) for mark in "\n=?")
        self.digits = np.array([self._single(digit) for digit in "0123456789"], dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes each token stands for, [vocab] int64; none for special ones. A byte-level token is spelled with one
        character a byte."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, index in self._tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[index] = len(token)
        for index in self._tokenizer.get_added_tokens_decoder():
            lengths[index] = 0
        return lengths

    @cached_property
    def record_tokens(self) -> float:
        """Mean tokens of a record `abcd=1234` and its newline, over a thousand random keys."""
        return self._key_lengths.mean() + 6

    @cached_property
    def least_record_tokens(self) -> int:
        return int(self._key_lengths.min()) + 6

    @cached_property
    def _key_lengths(self) -> np.ndarray:
        letters = np.random.default_rng(0).integers(97, 123, (1000, 4)).astype(np.uint8)
        return np.array([len(ids) for ids in self.encode_many([bytes(key).decode() for key in letters])])

    def _single(self, mark: str) -> int:
        ids = self.encode(f"ab{mark}cd")
        alone = self.encode(mark)
        if len(alone) != 1 or alone[0] not in ids:
            raise ValueError(f"{self.path}: {mark!r} is no token of its own: {ids}")
        return alone[0]


def train_bpe(documents: Iterator[str], vocab_size: int, path: Path) -> None:
    """Writes a byte-level BPE tokenizer of `vocab_size` tokens; digits never merge."""
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(json.loads(tokenizer.to_str()), indent=0, ensure_ascii=False) + "\n")
