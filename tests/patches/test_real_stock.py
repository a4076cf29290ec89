"""This repository's overlay on a copy of the real vLLM 0.6.3 that the interpreter of these tests has."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patches.engine import cli, pins
from patches.engine.diffs import apply_diff, parse_diff
from patches.engine.digests import digest_source
from patches.engine.layout import Layout, symbol_place
from patches.manifest import OVERLAYS
from tests.helpers.overlay_world import REPOSITORY, copy_tree, differences, snapshot

PROOF = REPOSITORY / "tests/patches/proof_imports.py"
EDITS = [overlay for overlay in OVERLAYS if overlay.kind == "edit"]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed tree, copied, and reverted where the overlay lies on it already."""
    spec = importlib.util.find_spec("vllm")
    assert spec and spec.origin, f"{sys.executable} has no vllm"
    copy = copy_tree(Path(spec.origin).resolve().parent, tmp_path_factory.mktemp("stock") / "vllm")
    assert cli.main(["--root", str(copy), "revert"]) == 0
    assert not (copy / "overlay").exists()
    return copy


@pytest.fixture
def tree(stock: Path, tmp_path: Path) -> Path:
    """A copy for one test; what is compiled is linked."""
    return shutil.copytree(stock, tmp_path / "vllm", copy_function=_link_binaries)


def _link_binaries(source: str, destination: str) -> None:
    (os.link if source.endswith(".so") else shutil.copy2)(source, destination)


def run(tree: Path, command: str) -> int:
    return cli.main(["--root", str(tree), command])


def test_apply_verify_revert(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(tree)
    assert run(tree, "plan") == 0
    assert differences(before, snapshot(tree)) == [], "plan wrote"
    assert run(tree, "apply-and-verify") == 0
    applied = snapshot(tree)
    printed = capsys.readouterr().out
    assert "pin pypi-0.6.3" in printed
    assert "DRIFT" not in printed
    assert run(tree, "apply") == 0
    assert "applied: 0 changes" in capsys.readouterr().out
    assert differences(applied, snapshot(tree)) == []
    assert run(tree, "status") == 0
    assert "applied and up to date" in capsys.readouterr().out
    assert run(tree, "revert") == 0
    assert differences(before, snapshot(tree)) == []


def test_crlf_stock(tree: Path) -> None:
    """The vendor's files have both line endings."""
    for file in tree.rglob("*.py"):
        file.write_bytes(file.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    before = snapshot(tree)
    assert run(tree, "plan") == 0
    assert run(tree, "apply-and-verify") == 0
    for overlay in EDITS:
        data = (tree / overlay.target).read_bytes()
        assert data.count(b"\n") == data.count(b"\r\n"), overlay.target
    assert run(tree, "revert") == 0
    assert differences(before, snapshot(tree)) == []


def test_every_pinned_symbol_guards(stock: Path) -> None:
    """The pins are those of the tree that is installed here, symbol by symbol."""
    wrong = []
    for path, by_pin in pins.load().stock.items():
        here, pinned = digest_source((stock / path).read_bytes()), by_pin["pypi-0.6.3"]
        wrong += [path] if here.whole != pinned.whole else []
        wrong += [f"{path}:{name}" for name, value in pinned.symbols.items() if here.symbols.get(name) != value]
    assert wrong == []


@pytest.mark.parametrize("overlay", EDITS, ids=lambda overlay: overlay.target)
def test_edit_names_the_functions_that_it_changes(overlay, stock: Path) -> None:
    """Else an edit could be laid over a function that is not what it was."""
    name = f"{overlay.target}.patch"
    before = (stock / overlay.target).read_bytes()
    hunks = parse_diff((Layout.of_repository().edits / name).read_text(encoding="utf-8"), name)
    after = apply_diff(before, hunks, name)
    old, new = digest_source(before).symbols, digest_source(after).symbols
    changed = {symbol for symbol in old if old[symbol] != new.get(symbol)}
    named = {symbol_place(overlay, symbol)[1] for symbol in overlay.symbols}
    assert changed <= named, f"changes {sorted(changed)}, names {sorted(named)}"
    compile(after, overlay.target, "exec")


def test_foreign_real_file_is_refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overlay = next(o for o in OVERLAYS if o.kind == "extension" and any("." in s and ":" not in s for s in o.symbols))
    symbol = next(s for s in overlay.symbols if "." in s and ":" not in s)
    file = tree / overlay.target
    text = file.read_text(encoding="utf-8")
    node = _find(ast.parse(text), symbol.split("."))
    lines = text.splitlines(keepends=True)
    first = node.body[0]
    lines.insert(first.lineno - 1, " " * first.col_offset + "changed = 1\n")
    file.write_text("".join(lines), encoding="utf-8")
    before = snapshot(tree)
    assert run(tree, "apply") == 2
    printed = capsys.readouterr().err
    assert f"{overlay.target}: FOREIGN: {overlay.target} {symbol} is [" in printed, printed
    assert differences(before, snapshot(tree)) == []


def _find(node: ast.AST, names: list[str]):
    for name in names:
        node = next(child for child in node.body if getattr(child, "name", None) == name)
    return node


def test_neither_torch_nor_vllm_is_imported(tree: Path) -> None:
    """The builder may have no driver."""
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from patches.engine.cli import main\n"
        f"status = [main(['--root', {str(tree)!r}, c]) for c in ('plan', 'apply', 'verify', 'status', 'revert')]\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy'}\n"
        "print(status, sorted({name.partition('.')[0] for name in sys.modules} & heavy))\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0] []", done


def test_our_classes_are_in_use(tree: Path) -> None:
    """Third proof; then the same at a server's start, all in one interpreter."""
    assert run(tree, "apply") == 0
    environment = {**os.environ, "PYTHONPATH": str(tree.parent)}
    done = subprocess.run([sys.executable, str(PROOF), str(tree)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    code = "from vllm.overlay.runtime.startup_check import check_deployed; print('vllm overlay:', check_deployed())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    line = [line for line in done.stdout.splitlines() if line.startswith("vllm overlay: ")]
    assert len(line) == 1, done.stdout
    assert f"pin pypi-0.6.3, {len(OVERLAYS)} overlays, manifest " in line[0]
