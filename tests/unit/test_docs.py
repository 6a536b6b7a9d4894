"""The documentation builds, and every link in it leads somewhere."""

import ast
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


BUG_CLASSES = 26


def bug_class_tests(page: str) -> dict[int, list[str]]:
    """Number to the tests that the table names for it."""
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", page, re.MULTILINE)
    assert len({number for number, _ in rows}) == len(rows), "a number has two rows"
    return {int(number): re.findall(r"`([\w/]+\.py::\w+)`", cells) for number, cells in rows}


def missing_tests(named: list[str]) -> list[str]:
    """Those of `path::name` that are no test function of that file."""
    found: list[str] = []
    for test in named:
        path, _, name = test.partition("::")
        file = ROOT / "tests" / path
        tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        if name not in functions or not name.startswith("test_"):
            found.append(test)
    return found


def test_every_bug_class_names_tests_that_exist():
    tests = bug_class_tests((ROOT / "docs" / "bug_classes.md").read_text())
    assert sorted(tests) == list(range(1, BUG_CLASSES + 1))
    assert [number for number, named in tests.items() if not named] == []
    assert missing_tests([test for named in tests.values() for test in named]) == []


@pytest.mark.parametrize(
    "named", ["unit/test_docs.py::test_nothing", "unit/test_nowhere.py::test_x", "unit/test_docs.py::bug_class_tests"]
)
def test_a_test_that_does_not_exist_is_noticed(named: str):
    assert missing_tests([named]) == [named]
