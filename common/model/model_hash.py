"""Names a model by its content: two services may only be paired when they run the same weights."""

from __future__ import annotations

from pathlib import Path

import xxhash

from common.model.checkpoint import checkpoint_files

BLOCK_BYTES = 1 << 24


def model_hash(directory: Path) -> str:
    """xxh3-128 over config.json and every weight file's name and bytes, 32 hex digits.

    Reads the whole checkpoint once (bounded memory, some GB/s): a hash of names and sizes alone would pass
    two fine-tunes of one model off as the same.
    """
    digest = xxhash.xxh3_128()
    for path in [directory / "config.json", *checkpoint_files(directory)]:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
