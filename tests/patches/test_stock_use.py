"""Rows name what their code stands on, so that a changed stock is noticed where it matters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from patches.engine import pins
from patches.engine.layout import Layout, symbol_place
from patches.manifest import OVERLAYS, Overlay
from tests.helpers.overlay_world import World
from tests.helpers.stock_use import Place, Sources, Uses


@pytest.fixture(scope="module")
def used(pin_tree: Path) -> dict[str, dict[Place, str]]:
    """Row -> what its Python files stand on in this pin."""
    return used_by_rows(Layout.of_repository(), pin_tree)


def used_by_rows(layout: Layout, stock: Path) -> dict[str, dict[Place, str]]:
    sources = Sources(stock, layout.overrides)
    found: dict[str, dict[Place, str]] = {}
    for row in layout.overlays:
        files = [p.path for p in layout.pieces_of(row) if p.path.endswith(".py") and row.kind != "edit"]
        found[row.id] = {
            place: f"{how} in {file}" for file in files for place, how in Uses(sources, file).found.items()
        }
    return found


def unnamed(overlays: tuple[Overlay, ...], used: dict[str, dict[Place, str]]) -> list[str]:
    """What is used and named neither by the row, nor by one that it requires, nor by one that requires it."""
    faults = []
    for row in overlays:
        near = [row, *(other for other in overlays if row.id in other.requires), *required(row, overlays)]
        named = {symbol_place(other, symbol) for other in near for symbol in other.symbols}
        faults += [
            f"row {row.id} does not name {path}:{name} ({how})"
            for (path, name), how in sorted(used[row.id].items())
            if (path, name) not in named
        ]
    return faults


def required(row: Overlay, overlays: tuple[Overlay, ...]) -> list[Overlay]:
    by_id = {other.id: other for other in overlays}
    found: dict[str, Overlay] = {}
    todo = list(row.requires)
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = by_id[name]
            todo += by_id[name].requires
    return list(found.values())


def test_rows_name_what_they_stand_on(used: dict[str, dict[Place, str]]) -> None:
    faults = unnamed(OVERLAYS, used)
    assert not faults, "\n" + "\n".join(faults)
    assert sum(map(len, used.values())) > 150, "the reader has lost its eyes"


def test_a_symbol_that_is_left_out_is_missed(used: dict[str, dict[Place, str]]) -> None:
    """The control: no override of ours could go unnamed. Taken out of all rows, because others may name it too."""
    for path, name in sorted({place for places in used.values() for place in places}):
        without = tuple(
            replace(row, symbols=tuple(s for s in row.symbols if symbol_place(row, s) != (path, name)))
            for row in OVERLAYS
        )
        users = [row for row in OVERLAYS if (path, name) in used[row.id]]
        faults = [fault for fault in unnamed(without, used) if f" does not name {path}:{name} (" in fault]
        assert len(faults) == len(users) > 0, f"without {path}:{name}: {faults}"


def test_every_row_is_covered_in_both_pins() -> None:
    known = pins.load()
    absent = [
        f"{row.id}: {path}:{name} in {pin}"
        for row in OVERLAYS
        for path, name in (symbol_place(row, symbol) for symbol in row.symbols)
        for pin in ("pypi-0.6.3", "corex-3.2.3")
        if name not in known.stock[path][pin].symbols
    ]
    assert absent == []
    mute = [row.id for row in OVERLAYS if row.kind != "addition" and not row.symbols]
    assert mute == [], "a change to stock that no symbol vouches for"


STOCK = {
    "__init__.py": "",
    "base.py": dedent(
        """\
        import abc

        class Base(abc.ABC):
            def step(self): ...
            def stop(self): ...
            def start(self): ...

        def helper(): ...
        def annotation(): ...
        LIMIT = 1
        """
    ),
    "core/__init__.py": "from .engine import Engine\n",
    "core/engine.py": dedent(
        """\
        from vllm.base import Base as _Base, helper

        class Engine(_Base):
            def step(self): ...
            def private(self): ...

        class Other(Engine): ...

        def make(): ...
        def taken(): ...
        """
    ),
}
OURS = {
    "core/engine.py": dedent(
        """\
        from vllm.base import LIMIT, annotation
        from vllm.core import engine_stock as _stock
        from vllm.overlay.rebind import rebind
        from vllm.overlay.substance import taken

        class Mixin:
            def step(self): ...

        class Engine(Mixin, _stock.Engine):
            def own(self): ...
            def stop(self: annotation) -> annotation:
                super().start()
                _stock.Engine.private(self)
                return LIMIT

        rebind(_stock, "helper", None)
        rebind(_stock.Engine, "step", None)

        def __getattr__(name): return getattr(_stock, name)
        """
    ),
    "overlay/substance.py": dedent(
        """\
        from vllm.core import Engine, engine

        class Further(Engine):
            def step(self): ...
            def own(self): ...
            def start(self): engine.make()

        def taken(): ...
        """
    ),
}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "core/engine.py",
            {
                "core/engine.py:Engine": "takes its name",
                "core/engine.py:taken": "takes its name",
                "base.py:Base.stop": "overridden by Engine",
                "base.py:Base.start": "called by super() in Engine",
                "core/engine.py:Engine.private": "used",
                "base.py:helper": "rebound",
                "core/engine.py:Engine.step": "rebound",
            },
        ),
        (
            # What the package re-exports is our Engine now: stock's methods are found behind it.
            "overlay/substance.py",
            {
                "core/engine.py:Engine.step": "overridden by Further",
                "base.py:Base.start": "overridden by Further",
                "core/engine.py:make": "used",
            },
        ),
    ],
)
def test_what_is_found(tmp_path: Path, path: str, expected: dict[str, str]) -> None:
    for folder, files in (("stock", STOCK), ("ours", OURS)):
        for name, text in files.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(text)
    found = Uses(Sources(tmp_path / "stock", tmp_path / "ours"), path).found
    assert {f"{file}:{name}": how for (file, name), how in found.items()} == expected


def test_an_applied_tree_is_read_as_stock(world: World) -> None:
    before = used_by_rows(world.layout, world.tree)
    assert before["better-order"], before
    world.must("apply")
    assert used_by_rows(world.layout, world.tree) == before
