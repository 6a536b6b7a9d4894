"""Builds the text that dsv4-nano is trained on: Python's standard library and documentation sources.

Both come with Python (package python3.11-doc on Debian for the second) under the PSF licence. Output: one xz
file of bytes, documents separated by a NUL byte, in a seeded order; with --bpe also a tokenizer trained on them.
"""

from __future__ import annotations

import argparse
import lzma
import random
import sysconfig
from pathlib import Path

from tools.nano.codec import train_bpe

SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "encodings"}


def documents(docs: Path) -> list[bytes]:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    code = [p for p in stdlib.rglob("*.py") if not SKIPPED & set(p.relative_to(stdlib).parts)]
    prose = list(docs.rglob("*.txt"))
    if not prose:
        raise SystemExit(f"no .txt under {docs}; install python3.11-doc or name another folder with --docs")
    found = [path.read_bytes() for path in sorted(code) + sorted(prose)]
    kept = [text for text in found if 200 < len(text) < 400_000 and text.isascii() and b"\0" not in text]
    random.Random(0).shuffle(kept)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--docs", type=Path, default=Path("/usr/share/doc/python3.11/html/_sources"))
    parser.add_argument("--bpe", type=Path, help="write a byte-level BPE tokenizer.json here")
    parser.add_argument("--bpe-vocab", type=int, default=1536, help="its tokens, special ones included")
    options = parser.parse_args()
    texts = documents(options.docs)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(lzma.compress(b"\0".join(texts)))
    if options.bpe:
        # Without the held-out hundredth at the end, see tools/nano/data.py.
        train_bpe((text.decode() for text in texts[: -len(texts) // 50]), options.bpe_vocab, options.bpe)
    print(f"{len(texts)} documents, {sum(map(len, texts))} bytes, {options.out.stat().st_size} compressed")


if __name__ == "__main__":
    main()
