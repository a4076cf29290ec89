"""repin: what is new in a stock tree, and which rows somebody has to read again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from patches.engine import pins
from patches.engine.repin import changes
from patches.engine.stock import Tree
from patches.manifest import OVERLAYS
from tests.helpers.overlay_world import STOCK, World, copy_tree, row, symbol_entry, write

SCHEDULER, CONFIG = STOCK["core/scheduler.py"], STOCK["config.py"]
TABLE_OF_STOCK = "STOCK_SYMBOLS"  # the environment's name for the table that pins.json was cut from


def new_tree(world: World, **files: str) -> Path:
    """A stock tree in which some files are others; their names with __ for the slash."""
    tree = copy_tree(world.tree, world.repository / "new" / "vllm")
    for name, text in files.items():
        write(tree / (name.replace("__", "/") + ".py"), text)
    return tree


def test_nothing_new(world: World) -> None:
    before = world.pins_file.read_bytes()
    printed = world.must(f"repin {world.pins_file.with_name('stock_symbols.json')}")
    assert printed == (
        "pin-a: nothing changed\npin-b: nothing changed\nrows to read again: none\n3 stock files pinned: pin-a, pin-b\n"
    )
    assert world.must(f"repin {world.tree} pin-a").startswith("pin-a: nothing changed\n")
    assert world.must(f"repin --dry-run {world.tree} pin-a").endswith("rows to read again: none\n")
    assert world.pins_file.read_bytes() == before


def test_changed_symbols_and_the_rows_that_stand_on_them(world: World) -> None:
    """better-order overrides schedule; kernels and higher-limit stand on Config.limit; fast-sampler on nothing new."""
    tree = new_tree(
        world,
        core__scheduler=SCHEDULER.replace('"stock"', '"other"'),
        config=CONFIG.replace("return LIMIT", "return 7"),
    )
    before = world.pins_file.read_bytes()
    status, printed = world.run(f"repin {tree} pin-b --dry-run")
    expected = (
        "pin-a: nothing changed\n"
        "pin-b: 2 files; symbols: 2 changed, 0 vanished, 0 appeared\n"
        "  config.py: changed Config.limit\n"
        "  core/scheduler.py: changed Scheduler.schedule\n"
        "rows to read again: 3\n"
        "  kernels (a text): config.py:Config.limit\n"
        "  better-order (a text): core/scheduler.py:Scheduler.schedule\n"
        "  higher-limit (a text): config.py:Config.limit\n"
    )
    assert (status, printed) == (1, expected)
    assert world.pins_file.read_bytes() == before, "a dry run wrote"
    assert world.must(f"repin {tree} pin-b") == expected + "3 stock files pinned: pin-a, pin-b\n"
    world.stock("core/scheduler.py", (tree / "core/scheduler.py").read_text())
    assert "core/scheduler.py: DRIFT: equals pin-b, while the tree is pin-a" in world.run("plan")[1], "no pin of it"


def test_whole_file_without_a_symbol(world: World) -> None:
    """Information for an extension; but an edit stands on lines, and a replacement on all of what it replaces."""
    tree = new_tree(
        world,
        core__scheduler=SCHEDULER.replace('"stock helper"', '"another"'),
        config=CONFIG.replace("return 0", "return 1"),
        sampler=STOCK["sampler.py"] + "X = 1\n",
    )
    status, printed = world.run(f"repin --dry-run {tree} pin-a")
    assert status == 1
    for path in ("config.py", "core/scheduler.py", "sampler.py"):
        assert f"  {path}: changed, in nothing that a row names\n" in printed, printed
    assert printed.endswith(
        "rows to read again: 2\n  higher-limit (a text): config.py\n  fast-sampler (a text): sampler.py\n"
    ), printed


def test_row_that_names_nothing_of_its_target_is_read_again(world: World) -> None:
    rows = tuple(other for other in world.layout.overlays if other.id != "better-order")
    world.set_rows((*rows, row("better-order", "extension", "core/scheduler.py", ("config.py:Config",))))
    tree = new_tree(world, core__scheduler=SCHEDULER.replace('"stock helper"', '"another"'))
    assert "  better-order (a text): core/scheduler.py\n" in world.run(f"repin --dry-run {tree} pin-a")[1]


def test_layout_is_nothing_new(world: World) -> None:
    tree = new_tree(world, config="# New\r\n" + CONFIG.replace("\n", "\r\n"))
    assert world.must(f"repin --dry-run {tree} pin-a").startswith("pin-a: nothing changed\n")


def test_new_pin_is_compared_with_the_nearest(world: World) -> None:
    table = world.stock_table()
    table["config.py"]["pin-b"] = symbol_entry(CONFIG.replace("return LIMIT", "return 7"))
    world.repin(table)
    tree = new_tree(
        world, config=CONFIG.replace("return LIMIT", "return 7"), core__scheduler=SCHEDULER.replace('"stock"', '"x"')
    )
    printed = world.must(f"repin {tree} pin-c")
    assert "pin-c (new; against pin-b, the nearest): 1 files; symbols: 1 changed, 0 vanished, 0 appeared\n" in printed
    assert printed.endswith("3 stock files pinned: pin-a, pin-b, pin-c\n")
    for path, text in (("config.py", "config.py"), ("core/scheduler.py", "core/scheduler.py")):
        world.stock(path, (tree / text).read_text())
    (world.layout.edits / "config.py.patch").write_text(
        (world.layout.edits / "config.py.patch").read_text().replace("return LIMIT\n", "return 7\n")
    )
    assert "pin pin-c," in world.must("apply")
    printed = world.must(f"repin {world.pins_file.with_name('stock_symbols.json')}")
    assert "pin-c: no pin any more\n" in printed, printed


@pytest.mark.parametrize(
    ("file", "text", "said", "refusal"),
    [
        (
            "config",
            "class Config:\n    pass\n",
            "  config.py: vanished Config.limit\n",
            "config.py of pin-a has no symbol Config.limit, on which kernels, higher-limit stands: rework the row",
        ),
        (
            "core__scheduler",
            None,
            "  core/scheduler.py: vanished Scheduler, Scheduler.schedule\n",
            "pin-a has no core/scheduler.py, on which better-order stands: rework the row",
        ),
        (
            "sampler",
            "no python",
            "  sampler.py: vanished sample\n",
            "pin-a has no sampler.py, on which fast-sampler stands: rework the row",
        ),
    ],
)
def test_tree_that_lacks_a_symbol(world: World, file: str, text: str | None, said: str, refusal: str) -> None:
    tree = new_tree(world, **({file: text} if text else {}))
    if text is None:
        (tree / (file.replace("__", "/") + ".py")).unlink()
    before = world.pins_file.read_bytes()
    for command in (f"repin {tree} pin-a", f"repin --dry-run {tree} pin-a"):
        printed = world.refused(command)
        assert said in printed, printed
        assert [line for line in printed.splitlines() if line.startswith("refused: ")] == [
            f"refused: {refusal} in patches/manifest.py and its code"
        ]
    assert world.pins_file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "repin needs the table of symbols, or a tree and the name of its pin: repin STOCK_SYMBOLS.json, or"),
        ("{tree}", "repin needs the table of symbols, or a tree and the name of its pin"),
        ("{tree} pin-a {tree}", "repin needs the table of symbols, or a tree and the name of its pin"),
        ("{tree} pin|a", "'pin|a' is no name for a pin"),
        ("{tree} unknown", "'unknown' is no name for a pin"),
        ("/nowhere pin-a", "/nowhere is no vllm package"),
        ("/nowhere.json", "/nowhere.json cannot be read as a table of symbols"),
        ("{pins}", "cannot be read as a table of symbols"),
        ("{tree} pin-a --frob", "unrecognized arguments: --frob"),
    ],
)
def test_unusable_arguments(world: World, arguments: str, message: str) -> None:
    before = world.pins_file.read_bytes()
    printed = world.refused(f"repin {arguments.format(tree=world.tree, pins=world.pins_file)}")
    assert message in printed
    assert printed.count("\n") == 1, f"more than one line:\n{printed}"
    assert world.pins_file.read_bytes() == before


def test_applied_tree_is_no_stock(world: World) -> None:
    """Ours must not become what stock is compared with."""
    world.must("apply")
    assert f"the overlay lies on {world.tree}: `bash patch_ops.sh --root" in world.refused(f"repin {world.tree} pin-a")
    (world.tree / "overlay/receipt.json").unlink()
    assert "the overlay lies on" in world.refused(f"repin {world.tree} pin-a")
    world.must("revert")
    world.must(f"repin {world.tree} pin-a")


def test_pins_in_use_that_know_too_little(world: World) -> None:
    """A row that names something new needs the tree of every pin."""
    world.source("overlay/other.py", "X = 1\n")
    extra = row("other", "addition", "overlay/other.py", ("config.py:Config.other",))
    world.set_rows((*world.layout.overlays, extra), repin=False)
    printed = world.refused(f"repin {world.tree} pin-a")
    assert "nothing is known of config.py Config.other in pin pin-b: give its tree too" in printed
    printed = world.must(f"repin {world.tree} pin-a {world.tree} pin-b")
    assert "pin-a: 1 files; symbols: 0 changed, 0 vanished, 1 appeared\n  config.py: appeared Config.other\n" in printed
    assert "rows to read again: none" in printed
    world.must("apply")


def test_broken_pins_are_made_anew(world: World) -> None:
    table = world.pins_file.with_name("stock_symbols.json")
    before = world.pins_file.read_bytes()
    for text in ("<<<<<<< ours\n{}\n", "[]", '{"config.py": {"pin-a": {}}}', '{"config.py": 1}'):
        world.pins_file.write_text(text)
        for command in ("apply", f"repin {world.tree} pin-a"):
            printed = world.refused(command)
            assert "is broken (" in printed, printed
            assert printed.count("\n") == 1, printed
        assert world.must(f"repin {table}").startswith("no pins to compare with\n")
        assert world.pins_file.read_bytes() == before


def test_pin_without_a_file_is_no_pin(world: World) -> None:
    raw = json.loads(world.pins_file.read_text())
    del raw["config.py"]["pin-b"]
    world.pins_file.write_text(json.dumps(raw))
    assert "patches/pins.json lacks config.py of pin-b: run `bash patch_ops.sh repin" in world.refused()


def test_our_digests_are_those_of_the_table(pin_tree: Path, pin: str) -> None:
    """The pins in use come from a table that another program wrote; a tree read by ours gives the same."""
    known = pins.load()
    assert changes(pin, pin, known, Tree(pin_tree).digests, OVERLAYS) == []


@pytest.fixture(scope="module")
def table() -> Path:
    if TABLE_OF_STOCK not in os.environ:
        pytest.skip(f"{TABLE_OF_STOCK} is not set: the table of the symbols of both stock trees (JSON)")
    return Path(os.environ[TABLE_OF_STOCK])


def test_pins_are_the_cut_of_the_table(table: Path) -> None:
    assert pins.cut(pins.read_table(table), OVERLAYS) == pins.load()


def test_every_file_of_a_tree_is_read_as_in_the_table(table: Path, pin: str, pin_tree: Path) -> None:
    lookup, tree = pins.read_table(table)[pin], Tree(pin_tree)
    paths = [path for path, by_pin in json.loads(table.read_text()).items() if pin in by_pin]
    differing = [path for path in paths if tree.digests(path) != lookup(path)]
    assert differing == []
    assert len(paths) > 400, paths
