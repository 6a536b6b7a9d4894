"""Writes deploy/locks: every package of an image with version and hashes, from pyproject.toml and
deploy/constraints.txt. `python tools/gen_locks.py`; needs uv (`pip install uv`) and reaches the package index.

The resolver alone runs; nothing is installed, so the CUDA sets can be locked on any machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy" / "locks"
CONSTRAINTS = "deploy/constraints.txt"
# Debian 12's Python and C library, on which the image stands.
PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def lock(source: str, name: str, *flags: str) -> None:
    command = ["uv", "pip", "compile", "-q", source, "--generate-hashes", "--no-header", *PLATFORM, *flags]
    subprocess.run([*command, "-o", f"deploy/locks/{name}.txt"], cwd=ROOT, check=True)


def main() -> int:
    # A folder of wheels that pip is told to look at has torch's build without CUDA, or else PyTorch's own index.
    wheels = os.environ.get("PIP_FIND_LINKS")
    torch = ("--find-links", wheels) if wheels else ("--extra-index-url", TORCH_CPU_INDEX)
    lock("pyproject.toml", "cpu", "--extra", "cpu", "-c", CONSTRAINTS, *torch)
    if "torch==2.13.0+cpu" not in (LOCKS / "cpu.txt").read_text(encoding="utf-8"):
        print("locks: the cpu set must have torch's build without CUDA (torch==2.13.0+cpu)", file=sys.stderr)
        return 1
    for name in ("cuda12", "cuda13"):
        lock("pyproject.toml", name, "--extra", name, "-c", CONSTRAINTS)
    lock("deploy/locks/build.in", "build")
    return 0


if __name__ == "__main__":
    sys.exit(main())
