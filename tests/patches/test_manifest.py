"""This repository's own table: every file in one row, every row with its pins, its test and its line in the README."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from patches.engine import pins, readme
from patches.engine.errors import Refused
from patches.engine.layout import Layout
from patches.manifest import OVERLAYS
from tests.helpers.overlay_world import REPOSITORY, World, row

EXTENSIONS = [overlay for overlay in OVERLAYS if overlay.kind == "extension"]


def test_every_file_is_in_one_row_and_back() -> None:
    Layout.of_repository().check()


def test_pins_go_with_the_table() -> None:
    known = pins.load()
    known.check(OVERLAYS)
    assert known.names == ["corex-3.2.3", "pypi-0.6.3"]


def test_readme_goes_with_the_table() -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert text == readme.with_table(text, OVERLAYS), "run `bash patch_ops.sh readme`"


def test_every_row_has_its_test() -> None:
    absent = []
    for overlay in OVERLAYS:
        file, _, name = overlay.test.partition("::")
        path = REPOSITORY / file
        function = name.split("[")[0]
        if not path.exists() or (function and f"def {function}(" not in path.read_text(encoding="utf-8")):
            absent.append(f"{overlay.id}: {overlay.test}")
    assert absent == []


@pytest.mark.parametrize("overlay", EXTENSIONS, ids=lambda overlay: overlay.target)
def test_extension_keeps_clear_of_the_traps(overlay) -> None:
    """It stands on its sibling, forwards the rest, imports no star, and takes stock's names by rebind only."""
    source = (REPOSITORY / "vllm_overrides" / overlay.target).read_text(encoding="utf-8")
    tree = ast.parse(source)
    sibling = Path(overlay.target).stem + "_stock"
    assert sibling in source, f"does not import {sibling}"
    assert any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body), (
        "forwards nothing"
    )
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert "*" not in names, "stock rebinds names, which a star import would not see"
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.ImportFrom, ast.Import))
        for alias in node.names
        if alias.name.endswith("_stock")
    }
    assigned = [
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in aliases
    ]
    assert assigned == [], "use vllm.overlay.rebind.rebind"


def test_world_is_in_order(world: World) -> None:
    world.layout.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "Not Kebab"}, "row Not Kebab: the id must be kebab-case"),
        ({"reason": " "}, "row better-order: reason is empty"),
        ({"kind": "patch"}, "row better-order: kind 'patch' is none of addition"),
        ({"target": "../x.py"}, "row better-order: target '../x.py' must be a plain path"),
        ({"target": "core/x_stock.py"}, "row better-order: target 'core/x_stock.py' must be a plain path"),
        ({"target": "data.json"}, "row better-order: only .py files of stock can be changed"),
        ({"target": "core/__init__.py"}, "row better-order: __init__.py cannot be extended"),
        ({"target": "gone.py"}, "row better-order: vllm_overrides/gone.py does not exist"),
        ({"requires": ("nothing",)}, "row better-order: requires nothing, which is no row"),
        ({"id": "package"}, "2 rows have the id package"),
        ({"target": "sampler.py"}, "2 rows have the target sampler.py"),
        ({"target": "overlay/kernels/__init__.py", "kind": "addition"}, "overlay/kernels/__init__.py is in 2 rows"),
        ({"target": "overlay/receipt.json", "kind": "addition"}, "row better-order: that path is the receipt's"),
        (
            {"target": "overlay/none/", "kind": "addition"},
            "row better-order: no file under vllm_overrides/overlay/none/",
        ),
        ({"kind": "addition"}, "symbol Scheduler: an addition has no stock file of its own"),
    ],
)
def test_faulty_row_is_refused(world: World, change: dict, message: str) -> None:
    rows = tuple(
        replace(overlay, **change) if overlay.id == "better-order" else overlay for overlay in world.layout.overlays
    )
    world.set_rows(rows, repin=False)
    assert message in world.refused()


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("overlay/new.py", "X = 1\n", "in no row: vllm_overrides/overlay/new.py: add rows to"),
        ("overlay/kernels/x.json", "{}\n", "overlay/kernels/x.json: files of this type have no comments"),
        ("overlay/kernels/x.py", "X = 1\r\n", "CRLF line endings in vllm_overrides/overlay/kernels/x.py: take a"),
        ("overlay/kernels/x.py", "# vllm-overlay: x\nX = 1\n", "overlay/kernels/x.py holds a marker line"),
        ("../patches/edits/x.txt", "", "in no row: patches/edits/x.txt"),
    ],
)
def test_faulty_file_is_refused(world: World, path: str, text: str, message: str) -> None:
    world.source(path, text)
    assert message in world.refused()


def test_pins_that_do_not_go_with_the_rows(world: World) -> None:
    world.set_rows((*world.layout.overlays[:-1], replace(world.layout.overlays[-1], symbols=())), repin=False)
    assert "pins.json, sampler.py of pin-a, does not go with the manifest (sample): run `bash" in world.refused()
    world.set_rows(world.layout.overlays[:-1], repin=False)
    (world.layout.overrides / "sampler.py").unlink()
    assert "pins.json does not go with the manifest (sampler.py): run `bash" in world.refused()
    world.pins_file.unlink()
    assert "does not exist: run `bash patch_ops.sh repin" in world.refused()
    world.pins_file.write_text("{")
    assert "is broken" in world.refused()


@pytest.mark.parametrize(
    ("symbols", "message"),
    [(("nothing",), "sampler.py of pin-a has no symbol nothing"), (("gone.py:x",), "pin-a has no gone.py")],
)
def test_repin_refuses_what_a_pin_lacks(world: World, symbols: tuple[str, ...], message: str) -> None:
    world.set_rows(
        (*world.layout.overlays, replace(row("other", "replacement", "sampler.py"), symbols=symbols)), repin=False
    )
    table = world.pins_file.with_name("stock_symbols.json")
    before = world.pins_file.read_bytes()
    assert message in world.refused(f"repin {table}")
    assert world.pins_file.read_bytes() == before
    assert "cannot be read as a table of symbols" in world.refused("repin /nowhere.json")
    assert "repin needs the table" in world.refused("repin")


def test_readme_without_its_lines() -> None:
    with pytest.raises(Refused, match="lacks the lines"):
        readme.with_table("# Nothing\n", OVERLAYS)


def test_what_the_vendor_changed_is_not_replaced() -> None:
    """A replacement would lose the vendor's own changes; ours stands on them."""
    known = pins.load().stock
    changed = {path for path, by_pin in known.items() if len({stock.whole for stock in by_pin.values()}) > 1}
    targets = {overlay.target: overlay.kind for overlay in OVERLAYS if overlay.target in changed}
    assert {path: kind for path, kind in targets.items() if kind not in ("extension", "edit")} == {}
    assert {"engine/arg_utils.py", "engine/async_llm_engine.py", "entrypoints/openai/api_server.py"} <= targets.keys()
    assert {"worker/model_runner.py", "attention/selector.py", "distributed/parallel_state.py"} <= targets.keys()
