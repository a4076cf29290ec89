"""Stock that is not quite a pin: applied with a warning when what the row stands on is unchanged."""

from __future__ import annotations

import json

import pytest

from tests.helpers.overlay_world import EDIT, STOCK, World, differences, row, snapshot, symbol_entry

DRIFTED = STOCK["core/scheduler.py"].replace('return "stock helper"', 'return "another helper"')


def test_drift_is_applied_warned_and_recorded(world: World) -> None:
    world.stock("core/scheduler.py", DRIFTED)
    before = snapshot(world.tree)
    status, printed = world.run("plan")
    assert status == 1, printed
    assert "DRIFT    extension   core/scheduler.py" in printed
    warning = "warning: core/scheduler.py: DRIFT: equals no pin, but every symbol that the row stands on does\n"
    assert printed.count(warning) == 1, printed
    assert warning in world.must("")
    assert list(json.loads((world.tree / "overlay/receipt.json").read_text())["drift"]) == ["core/scheduler.py"]
    assert (world.tree / "core/scheduler_stock.py").read_text() == DRIFTED
    status, printed = world.run("status")
    assert status == 1, printed
    assert "APPLIED (drift) extension   core/scheduler.py" in printed
    assert "applied: 0 changes" in world.must("apply")
    world.must("revert")
    assert differences(before, snapshot(world.tree)) == []


def test_layout_and_comments_are_no_drift(world: World) -> None:
    world.stock(
        "core/scheduler.py",
        "# A comment\n\n" + STOCK["core/scheduler.py"].replace("return helper()", "return (helper())"),
    )
    assert world.run("plan")[0] == 0


def test_row_without_symbols_cannot_vouch(world: World) -> None:
    rows = tuple(r for r in world.layout.overlays if r.id != "better-order")
    world.set_rows((*rows, row("better-order", "extension", "core/scheduler.py")))
    assert world.run("plan")[0] == 0
    world.stock("core/scheduler.py", DRIFTED)
    assert (
        "core/scheduler.py: FOREIGN: equals no pin, and the row names no symbol that could vouch for it"
        in world.refused()
    )


def test_edit_fits_where_lines_have_moved(world: World) -> None:
    """The line numbers of the diff are wrong here, and its lines stand in one place all the same."""
    world.stock("config.py", '"""New."""\nimport os\n\n' + STOCK["config.py"])
    assert world.run("apply")[0] == 0
    assert "return LIMIT + 1  # ours" in (world.tree / "config.py").read_text()


def test_edit_that_fits_twice_is_refused(world: World) -> None:
    """Even though one of the places has the diff's line numbers."""
    world.stock("config.py", STOCK["config.py"] + "\n\n" + STOCK["config.py"])
    assert (
        "config.py: FOREIGN: patches/edits/config.py.patch hunk 1 fits in 2 places: make the diff again"
        in world.refused()
    )


def test_edit_that_fits_no_more(world: World) -> None:
    """The symbol is as it was, but the context of the edit is not."""
    world.stock("config.py", STOCK["config.py"].replace("    def other", "    # Moved\n    def other"))
    assert "config.py: FOREIGN: patches/edits/config.py.patch hunk 1 (line 4," in world.refused()


@pytest.fixture
def two_pins(world: World) -> World:
    """pin-b has another Config.limit and another scheduler helper."""
    table = world.stock_table()
    table["config.py"]["pin-b"] = symbol_entry(CONFIG_B)
    table["core/scheduler.py"]["pin-b"] = symbol_entry(DRIFTED)
    world.repin(table)
    return world


CONFIG_B = STOCK["config.py"].replace("        return LIMIT\n", "        print()\n        return LIMIT\n")


def test_each_pin_is_matched_by_its_own_digests(two_pins: World) -> None:
    assert "pin pin-a," in two_pins.must("apply")
    two_pins.must("revert")
    two_pins.stock("config.py", CONFIG_B)
    two_pins.stock("core/scheduler.py", DRIFTED)
    (two_pins.layout.edits / "config.py.patch").write_text(EDIT.replace("-4,7 +4,7", "-7,4 +7,4").replace(HEAD, "\n"))
    assert "pin pin-b," in two_pins.must("")


HEAD = "\n class Config:\n\n     def limit(self):\n"


def test_symbols_must_agree_with_one_pin(two_pins: World) -> None:
    """Each symbol is as in some pin, but no pin has both."""
    extra = row("both", "addition", "overlay/both.py", ("config.py:Config.limit", "core/scheduler.py:helper"))
    two_pins.source("overlay/both.py", "X = 1\n")
    two_pins.set_rows((*two_pins.layout.overlays, extra), repin=False)
    table = two_pins.stock_table()
    table["config.py"]["pin-b"] = symbol_entry(CONFIG_B)
    table["core/scheduler.py"]["pin-b"] = symbol_entry(DRIFTED)
    two_pins.repin(table)
    assert two_pins.run("plan")[0] == 0
    two_pins.stock("core/scheduler.py", DRIFTED)
    printed = two_pins.refused()
    assert "overlay/both.py: FOREIGN: core/scheduler.py helper is [" in printed
    assert "(nearest pin pin-a)" in printed


def test_file_of_another_pin_is_drift(two_pins: World) -> None:
    """Fine by itself, but the tree as a whole is no pin then."""
    two_pins.stock("core/scheduler.py", DRIFTED)
    status, printed = two_pins.run("plan")
    assert status == 1, printed
    assert "core/scheduler.py: DRIFT: equals pin-b, while the tree is pin-a" in printed
