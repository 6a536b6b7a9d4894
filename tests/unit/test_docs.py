"""The documentation builds, and every link in it leads somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(target)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_site_builds_without_a_warning(tmp_path: Path):
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "site" / "metrics" / "index.html").exists()


@pytest.mark.parametrize("bad", ["[x](nowhere.md)", "[x](bytes.md#no-such-place)", "[x](../benchmarks)"])
def test_a_broken_link_fails_the_build(tmp_path: Path, bad: str):
    (tmp_path / "docs").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        (tmp_path / "docs" / page.name).write_text(page.read_text())
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    index = tmp_path / "docs" / "index.md"
    index.write_text(index.read_text() + f"\n{bad}\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "WARNING" in done.stderr


def test_every_relative_link_of_the_readmes_exists():
    for page in (ROOT / "README.md", ROOT / "models" / "dsv4-nano" / "README.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}" in navigation, page.name
