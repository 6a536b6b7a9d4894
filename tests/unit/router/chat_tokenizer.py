"""A tokenizer of single bytes that has DeepSeek-V4's control tokens, which like there are no special tokens."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from common.model.tokenizer import ByteLevelTokenizer
from router_service.chat_encoding import ASSISTANT, BOS, END_OF_THINKING, EOS, THINK, USER

CONTROL = {BOS: 0, EOS: 1, USER: 258, ASSISTANT: 259, THINK: 260, END_OF_THINKING: 261}


def chat_config() -> ModelConfig:
    return ModelConfig.from_dict(small_config() | {"vocab_size": 300})


@functools.cache
def chat_tokenizer() -> ByteLevelTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {BOS: 0, EOS: 1} | {letter: 2 + place for place, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.add_tokens([AddedToken(t, special=False) for t in (USER, ASSISTANT, THINK, END_OF_THINKING)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(str(path))
        return ByteLevelTokenizer(path, chat_config())
