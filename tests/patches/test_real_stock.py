"""This repository's overlay on copies of both real trees: the vLLM installed here, and the vendor's (VENDOR_TREE)."""

from __future__ import annotations

import ast
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patches.engine import cli, pins
from patches.engine.diffs import apply_diff, parse_diff
from patches.engine.digests import digest_source
from patches.engine.layout import Layout, kept_path, symbol_place
from patches.engine.markers import with_marker
from patches.manifest import OVERLAYS
from tests.helpers.overlay_world import REPOSITORY, copy_tree, differences, snapshot

PROOF = REPOSITORY / "tests/patches/proof_imports.py"
EDITS = [overlay for overlay in OVERLAYS if overlay.kind == "edit"]


@pytest.fixture(scope="module")
def stock(pin_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of each pin, copied, and reverted where the overlay lies on it already."""
    copy = copy_tree(pin_tree, tmp_path_factory.mktemp("stock") / "vllm")
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


def test_apply_verify_revert(tree: Path, pin: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(tree)
    assert run(tree, "plan") == 0
    assert differences(before, snapshot(tree)) == [], "plan wrote"
    assert run(tree, "apply-and-verify") == 0
    applied = snapshot(tree)
    printed = capsys.readouterr().out
    assert f"(pin {pin})" in printed and f"{len(OVERLAYS)} overlays, pin {pin}, " in printed, printed
    assert "DRIFT" not in printed
    assert "FOREIGN" not in printed
    assert run(tree, "apply") == 0
    assert "applied: 0 changes" in capsys.readouterr().out
    assert differences(applied, snapshot(tree)) == []
    assert run(tree, "status") == 0
    assert "applied and up to date" in capsys.readouterr().out
    assert run(tree, "revert") == 0
    assert differences(before, snapshot(tree)) == []


def test_stock_stays_beside_ours(tree: Path, stock: Path) -> None:
    """Changed files are extended or edited: stock's own code stays, byte for byte, and is what ours imports."""
    assert run(tree, "apply") == 0
    for overlay in OVERLAYS:
        if overlay.kind == "addition":
            assert not (stock / overlay.target.rstrip("/")).exists(), f"stock has {overlay.target}"
            continue
        assert overlay.kind in ("extension", "edit"), f"{overlay.target} is a {overlay.kind}: stock's code is lost"
        kept = kept_path(overlay.target)
        assert (tree / kept).read_bytes() == (stock / overlay.target).read_bytes(), f"{kept} is not stock's file"
        if overlay.kind == "extension":
            module = "vllm." + kept.removesuffix(".py").replace("/", ".")
            imported = imports_of(tree / overlay.target)
            assert module in imported, f"{overlay.target} imports {sorted(imported)} and not {module}"


def imports_of(file: Path) -> set[str]:
    """Full names of everything that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def lf(data: bytes) -> bytes:
    return data


def crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def every_second_line(data: bytes) -> bytes:
    lines = data.split(b"\n")
    return b"".join(line + (b"\n", b"\r\n")[i % 2] for i, line in enumerate(lines[:-1])) + lines[-1]


def first_half(data: bytes) -> bytes:
    half = data.index(b"\n", len(data) // 2) + 1 if data else 0
    return crlf(data[:half]) + data[half:]


@pytest.mark.parametrize(
    ("endings", "of_edits"),
    [((crlf,), crlf), ((every_second_line, lf, first_half, crlf), every_second_line), ((lf, crlf), first_half)],
    ids=["all CRLF", "mixed", "partly CRLF"],
)
def test_line_endings_of_stock(tree: Path, pin: str, endings, of_edits, capsys: pytest.CaptureFixture[str]) -> None:
    """The vendor's files have both kinds. Every file that a row names is turned, in one of the ways by turns."""
    named = sorted({path for overlay in OVERLAYS for path in pins.places_of(overlay)})
    plain = {path: (tree / path).read_bytes().replace(b"\r\n", b"\n") for path in named}
    edited = {overlay.target for overlay in EDITS}
    for path, turn in zip(named, itertools.cycle(endings)):
        (tree / path).write_bytes((of_edits if path in edited else turn)(plain[path]))
    before = snapshot(tree)
    assert run(tree, "apply-and-verify") == 0
    printed = capsys.readouterr().out
    assert f"pin {pin}, " in printed and "DRIFT" not in printed, printed
    for overlay in EDITS:
        data, name = (tree / overlay.target).read_bytes(), f"{overlay.target}.patch"
        hunks = parse_diff((Layout.of_repository().edits / name).read_text(encoding="utf-8"), name)
        expected = with_marker(apply_diff(plain[overlay.target], hunks, name), overlay.target, overlay.id)
        assert data.replace(b"\r\n", b"\n") == expected, f"{overlay.target} says something else"
        if of_edits is crlf:
            assert data.count(b"\n") == data.count(b"\r\n"), overlay.target
    assert run(tree, "revert") == 0
    assert differences(before, snapshot(tree)) == []


def test_every_pinned_symbol_guards(stock: Path, pin: str) -> None:
    """The pins are those of the real trees, symbol by symbol."""
    wrong = []
    for path, by_pin in pins.load().stock.items():
        here, pinned = digest_source((stock / path).read_bytes()), by_pin[pin]
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
        f"status = [main(['--root', {str(tree)!r}, c]) for c in ('plan', 'apply', 'verify', 'revert')]\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy'}\n"
        "print(status, sorted({name.partition('.')[0] for name in sys.modules} & heavy))\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0] []", done


def test_our_classes_are_in_use(tree: Path, pin: str) -> None:
    """Third proof: as at a server's start, all in one interpreter; then each target in one of its own."""
    if pin != "pypi-0.6.3":
        pytest.skip("the vendor's files need the vendor's libraries to be imported")
    assert run(tree, "apply") == 0
    environment = {**os.environ, "PYTHONPATH": str(tree.parent)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every interpreter would compile all of vllm
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    line = [line for line in done.stdout.splitlines() if line.startswith("vllm overlay: ")]
    assert len(line) == 1, done.stdout
    assert f"pin {pin}, {len(OVERLAYS)} overlays, manifest " in line[0]
    proof = [sys.executable, str(PROOF), str(tree)]
    names = done.stdout.splitlines()[-1]
    done = subprocess.run(proof, input=names, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"


# The last line: modules that are not vllm's, in the order of import. Some packages put objects and aliases among the
# modules, which have no file under that name.
START = """
import sys
from vllm.overlay.runtime.startup_check import check_deployed
print("vllm overlay:", check_deployed())
def own(module, name):
    return getattr(module, "__file__", None) and module.__spec__ is not None and module.__spec__.name == name
print(*[name for name, m in list(sys.modules.items()) if name.partition(".")[0] != "vllm" and own(m, name)])
"""
