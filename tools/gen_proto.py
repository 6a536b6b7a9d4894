"""Generates common/rpc/gen from proto/, or with --check says whether it is up to date.

protoc writes absolute imports (``from dsv4pd.v1 import ...``); they are rewritten so that the
generated package lives inside ``common`` and nothing importable is called ``proto``.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
TARGET = ROOT / "common" / "rpc" / "gen"
PACKAGE = "common.rpc.gen"


def generate(target: Path) -> None:
    """Writes the generated modules under `target`. Raises RuntimeError when protoc fails."""
    sources = sorted(str(p.relative_to(PROTO)) for p in PROTO.rglob("*.proto"))
    well_known = str(files("grpc_tools") / "_proto")
    arguments = [
        "protoc",
        f"-I{PROTO}",
        f"-I{well_known}",
        f"--python_out={target}",
        f"--pyi_out={target}",
        f"--grpc_python_out={target}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc failed on {sources}")
    for path in [*target.rglob("*.py"), *target.rglob("*.pyi")]:
        text = path.read_text()
        path.write_text(re.sub(r"^from dsv4pd\.", f"from {PACKAGE}.dsv4pd.", text, flags=re.M))
    for folder in [target, *(p for p in target.rglob("*") if p.is_dir())]:
        (folder / "__init__.py").write_text("")


def differing(left: Path, right: Path) -> list[str]:
    """Names of the generated files that are missing on one side or unequal."""
    names = {
        str(p.relative_to(root)) for root in (left, right) for p in root.rglob("*.py*") if p.suffix in (".py", ".pyi")
    }
    return sorted(
        n
        for n in names
        if not (left / n).exists() or not (right / n).exists() or not filecmp.cmp(left / n, right / n, shallow=False)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 on drift")
    options = parser.parse_args()
    if not options.check:
        TARGET.mkdir(parents=True, exist_ok=True)
        generate(TARGET)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        drift = differing(TARGET, Path(folder))
    for name in drift:
        print(f"generated code differs from proto/: {name}; run python tools/gen_proto.py")
    return 1 if drift else 0


if __name__ == "__main__":
    sys.exit(main())
