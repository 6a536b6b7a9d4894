"""Writes a small, seeded, untrained DeepSeek-V4 checkpoint in the native format."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.model.small_checkpoint import write_small_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", choices=["fp32", "bf16", "fp8", "fp8+fp4"], default="fp8")
    options = parser.parse_args()
    write_small_checkpoint(options.out, options.seed, options.weights)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
