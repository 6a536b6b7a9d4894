"""Text to token ids and back: `tokenizer.json` where the checkpoint has one, else plain bytes.

Without a tokenizer.json, token i + offset is byte i, with offset = vocab_size - 256: the ids below it are
special (beginning and end of sequence among them). Imports no torch, so that the router can use it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import decoders

from common.model.config import ConfigError, ModelConfig

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """What the services need of a tokenizer. `hash` identifies its behaviour."""

    hash: str

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without any special token added."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of text that somebody else wrote: a spelling of a special token in it is no special token."""
        ...

    def control_token(self, spelling: str) -> int | None:
        """The id of a token that was added to the vocabulary under this spelling, or None."""
        ...

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for a special token. Concatenated they are the text."""
        ...

    def is_special(self, token_id: int) -> bool: ...

    def token_text(self, token_id: int) -> str:
        """How the token is spelled, special ones included."""
        ...


def load_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """Raises ConfigError when the vocabulary does not fit the model."""
    path = directory / TOKENIZER_FILE
    if path.exists():
        return ByteLevelTokenizer(path, config)
    return ByteTokenizer(config)


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of some tokens; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(tokenizer.id_to_bytes(token) for token in token_ids).decode("utf-8", errors="replace")


class ByteTokenizer:
    """One token a byte, above `vocab_size - 256` special ids."""

    def __init__(self, config: ModelConfig) -> None:
        self.offset = config.vocab_size - 256
        specials = max(config.bos_token_id, *config.eos_token_id) + 1
        if self.offset < specials:
            raise ConfigError(
                f"no {TOKENIZER_FILE}, and vocab_size = {config.vocab_size} leaves no room for 256 bytes above "
                f"{specials} special ids"
            )
        self._specials = {config.bos_token_id: "<bos>"} | dict.fromkeys(config.eos_token_id, "<eos>")
        self.hash = hashlib.sha256(f"bytes+{self.offset}".encode()).hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        return [byte + self.offset for byte in text.encode("utf-8", errors="surrogatepass")]

    def encode_plain(self, text: str) -> list[int]:
        return self.encode(text)

    def control_token(self, spelling: str) -> int | None:
        return next((token for token, known in self._specials.items() if known == spelling), None)

    def id_to_bytes(self, token_id: int) -> bytes:
        return bytes([token_id - self.offset]) if token_id >= self.offset else b""

    def is_special(self, token_id: int) -> bool:
        return token_id < self.offset

    def token_text(self, token_id: int) -> str:
        if token_id < self.offset:
            return self._specials.get(token_id, f"<unused{token_id}>")
        return _spelled(self.id_to_bytes(token_id))


class ByteLevelTokenizer:
    """A byte-level BPE tokenizer.json, read by the `tokenizers` library."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        content = path.read_bytes()
        self.hash = hashlib.sha256(content).hexdigest()[:32]
        try:
            self._tokenizer = JsonTokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise ConfigError(f"{path.name} can't be read: {error}") from None
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if size > config.vocab_size:
            raise ConfigError(f"{path.name} has {size} tokens, config.json's vocab_size is {config.vocab_size}")
        if not isinstance(self._tokenizer.decoder, decoders.ByteLevel | decoders.Sequence):
            raise ConfigError(f"{path.name} has no byte-level decoder")
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._bytes = _byte_of_character()
        self._size = config.vocab_size
        self._plain = self._tokenizer if not added else JsonTokenizer.from_str(_without_added_tokens(content))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids

    def control_token(self, spelling: str) -> int | None:
        return next((token for token, known in self._added.items() if known == spelling.encode()), None)

    def id_to_bytes(self, token_id: int) -> bytes:
        if token_id in self._special:
            return b""
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else bytes(self._bytes[character] for character in token)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        if token_id in self._added:
            return self._added[token_id].decode()
        return _spelled(self.id_to_bytes(token_id))


def _without_added_tokens(content: bytes) -> str:
    document = json.loads(content)
    document["added_tokens"] = []
    return json.dumps(document)


def _spelled(content: bytes) -> str:
    """Text, or for bytes that are none, OpenAI's spelling of them, so that no two tokens look alike."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE spells bytes as printable characters: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
