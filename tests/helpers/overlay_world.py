"""A small vllm of a few files, an overlay for it with every kind of row, and the engine's commands run on the two."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent

import pytest

from patches.engine import cli
from patches.engine.digests import digest_source
from patches.engine.layout import Layout
from patches.manifest import Overlay

REPOSITORY = Path(__file__).resolve().parents[2]

STOCK = {
    "__init__.py": '"""A vllm."""\nfrom vllm import engine\n',
    "config.py": dedent(
        """\
        LIMIT = 1


        class Config:

            def limit(self):
                return LIMIT

            def other(self):
                return 0
        """
    ),
    "core/__init__.py": "",
    "core/scheduler.py": dedent(
        """\
        class Scheduler:

            def schedule(self):
                return "stock"

            def order(self):
                return helper()


        def helper():
            return "stock helper"
        """
    ),
    "engine.py": dedent(
        """\
        from vllm.core.scheduler import Scheduler


        def start():
            return Scheduler().schedule()
        """
    ),
    "sampler.py": "def sample():\n    return 'slow'\n",
    "data.json": "{}\n",
}
SOURCES = {
    "overlay/__init__.py": '"""Ours."""\n',
    "overlay/kernels/__init__.py": "NAME = 'kernels'",
    "overlay/kernels/csrc/kernel.cpp": "int one() { return 1; }\n",
    "overlay/kernels/README.md": "# Kernels\n",
    "core/scheduler.py": dedent(
        """\
        from vllm.core import scheduler_stock as _stock


        class Scheduler(_stock.Scheduler):
            def schedule(self):
                return "ours"


        def __getattr__(name):
            return getattr(_stock, name)
        """
    ),
    "sampler.py": "def sample():\n    return 'fast'\n",
}
EDIT = """\
--- a/config.py
+++ b/config.py
@@ -4,7 +4,7 @@
 class Config:

     def limit(self):
-        return LIMIT
+        return LIMIT + 1  # ours

     def other(self):
         return 0
"""


def row(
    overlay_id: str, kind: str, target: str, symbols: tuple[str, ...] = (), requires: tuple[str, ...] = ()
) -> Overlay:
    """A row with its texts filled in."""
    texts = dict.fromkeys(("reason", "upstream", "remove_when", "test"), "a text")
    return Overlay(id=overlay_id, kind=kind, target=target, symbols=symbols, requires=requires, **texts)


ROWS = (
    row("package", "addition", "overlay/__init__.py"),
    row("kernels", "addition", "overlay/kernels/", ("config.py:Config.limit",)),
    row("better-order", "extension", "core/scheduler.py", ("Scheduler", "Scheduler.schedule")),
    row("higher-limit", "edit", "config.py", ("Config.limit",)),
    row("fast-sampler", "replacement", "sampler.py", ("sample",)),
)


@dataclass
class World:
    """tree: the vllm folder. repository: overrides and edits. The pins are made of STOCK, never of the tree."""

    tree: Path
    repository: Path
    layout: Layout
    pins_file: Path
    capture: pytest.CaptureFixture[str]

    def run(self, command: str) -> tuple[int, str]:
        """Exit status, and what was printed (both streams)."""
        status = self.run_raw(command)
        printed = self.capture.readouterr()
        return status, printed.out + printed.err

    def run_raw(self, command: str) -> int:
        """The exit status; for a forked child, whose output nobody reads."""
        return cli.main(["--root", str(self.tree), *command.split()], self.layout, self.pins_file)

    def must(self, command: str) -> str:
        """What was printed; the command must succeed."""
        status, printed = self.run(command)
        assert status == 0, f"{command} exited with {status}:\n{printed}"
        return printed

    def refused(self, command: str = "apply") -> str:
        """What was printed; the command must be refused and leave the tree as it is."""
        before = snapshot(self.tree)
        status, printed = self.run(command)
        assert status == 2, f"{command} exited with {status}, expected a refusal:\n{printed}"
        assert differences(before, snapshot(self.tree)) == [], f"a refused {command} touched the tree"
        return printed

    def source(self, path: str, text: str) -> None:
        """Writes a file of the overlay."""
        write(self.layout.overrides / path, text)

    def stock(self, path: str, text: str) -> None:
        """Writes a file of the installed tree."""
        write(self.tree / path, text)

    def keep_rows(self, *ids: str) -> None:
        """Takes the other rows out of the table, with their sources, and makes the pins anew."""
        for piece in self.layout.pieces:
            if piece.row.id not in ids:
                piece.source.unlink()
        self.set_rows(tuple(overlay for overlay in self.layout.overlays if overlay.id in ids), repin=False)
        self.repin(self.stock_table())

    def set_rows(self, rows: tuple[Overlay, ...], repin: bool = True) -> None:
        """Another table."""
        self.layout = replace(self.layout, overlays=rows)
        if repin:
            self.repin(self.stock_table())

    def stock_table(self) -> dict[str, dict[str, dict]]:
        """The table of symbols of STOCK, in the form of stock_symbols.json, for two pins that do not differ."""
        entries = {path: symbol_entry(text) for path, text in STOCK.items() if path.endswith(".py")}
        return {path: {"pin-a": entry, "pin-b": entry} for path, entry in entries.items()}

    def repin(self, table: dict) -> None:
        """Makes the pins out of table."""
        file = self.pins_file.with_name("stock_symbols.json")
        file.write_text(json.dumps(table))
        self.must(f"repin {file}")


def make_world(folder: Path, capture: pytest.CaptureFixture[str], stock: dict[str, str] | None = None) -> World:
    """A world in folder, nothing applied. stock: other contents than STOCK."""
    repository = folder / "repository"
    for path, text in (stock or STOCK).items():
        write(folder / "site" / "vllm" / path, text)
    for path, text in SOURCES.items():
        write(repository / "vllm_overrides" / path, text)
    write(repository / "patches" / "edits" / "config.py.patch", EDIT)
    layout = Layout(repository / "vllm_overrides", repository / "patches" / "edits", ROWS)
    world = World(folder / "site" / "vllm", repository, layout, repository / "pins.json", capture)
    world.repin(world.stock_table())
    return world


def symbol_entry(text: str) -> dict:
    """One file of a table of symbols."""
    digests = digest_source(text.encode())
    symbols = {
        name: {"bases": [base for base in value[6:].split(", ") if base]}
        if value.startswith("class ")
        else {"digest": value}
        for name, value in digests.symbols.items()
    }
    return {"digest": digests.whole, "symbols": symbols}


def write(path: Path, text: str) -> None:
    """Writes bytes as they are: no translation of line endings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def snapshot(tree: Path) -> dict[str, tuple]:
    """Everything below tree: folders, and of each file mode, time and hash; of what Python compiled, the name."""
    found: dict[str, tuple] = {}
    for path in sorted(tree.rglob("*")):
        status = path.lstat()
        if path.is_dir():
            content: tuple = ("folder",)
        elif "__pycache__" in path.parts:
            content = ("compiled",)
        else:
            content = (oct(status.st_mode), status.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        found[path.relative_to(tree).as_posix()] = content
    return found


def differences(before: dict[str, tuple], after: dict[str, tuple]) -> list[str]:
    """What differs between two snapshots, for messages."""
    names = sorted(before.keys() | after.keys())
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names if before.get(name) != after.get(name)]


def copy_tree(source: Path, destination: Path) -> Path:
    """Copies a vllm folder without what Python compiled."""
    return shutil.copytree(source, destination, ignore=shutil.ignore_patterns("__pycache__"))
