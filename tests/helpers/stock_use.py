"""What deployed code stands on in stock, found by reading both: it lists the symbols that a row has to name.

Counted is what breaks silently or at a distance when stock changes it: a method that a class of ours overrides or calls
by ``super()``, a function or class of stock that a module of ours takes the name of, rebinds, derives from, or uses
outside an annotation. Constants are not counted, because the pins record classes and functions only; neither are
attributes of objects.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from patches.engine.layout import files_below
from patches.engine.stock import Tree

Place = tuple[str, str]  # (path below vllm/, dotted name; empty for the module itself)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Module:
    """One parsed file. imports: local name -> place. defined: name -> class or function of the module's own body."""

    tree: ast.Module
    imports: dict[str, Place] = field(default_factory=dict)
    defined: dict[str, ast.stmt] = field(default_factory=dict)


class Sources:
    """Stock's files and ours. A path that ends in ``_stock.py`` is stock's own file of that name without it."""

    def __init__(self, stock: Path, overrides: Path) -> None:
        self._stock = Tree(stock)
        self._overrides = overrides
        self._ours = {path for path in files_below(overrides) if path.endswith(".py")}
        self._parsed: dict[str, Module | None] = {}

    def ours(self, path: str) -> bool:
        return path in self._ours

    def module(self, path: str) -> Module | None:
        """The file that ``import`` finds at path in an applied tree; None when there is none."""
        if path not in self._parsed:
            data = self._read(path)
            self._parsed[path] = None if data is None else self._parse(path, data)
        return self._parsed[path]

    def _read(self, path: str) -> bytes | None:
        if self.ours(path):
            return (self._overrides / path).read_bytes()
        content = self._stock.original(stock_path(path))
        return content.data if content else None

    def _parse(self, path: str, data: bytes) -> Module:
        module = Module(ast.parse(data.replace(b"\r\n", b"\n")))
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module.imports.update(self._imported(path, node))
        for statement in _own_statements(module.tree.body):
            if isinstance(statement, (ast.ClassDef, *_FUNCTIONS)):
                module.defined[statement.name] = statement
        return module

    def _imported(self, path: str, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Place]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and (place := self._file_of(alias.name)):
                    yield alias.asname, (place, "")
            return
        name = node.module or ""
        if node.level:
            package = ["vllm", *path.split("/")[:-1]]
            name = ".".join([*package[: len(package) - node.level + 1], *filter(None, [name])])
        for alias in node.names:
            if place := self._file_of(f"{name}.{alias.name}"):
                yield alias.asname or alias.name, (place, "")
            elif place := self._file_of(name):
                yield alias.asname or alias.name, (place, alias.name)

    def _file_of(self, name: str) -> str | None:
        """The file of a dotted module name of vllm's."""
        package, _, rest = name.partition(".")
        if package != "vllm":
            return None
        base = rest.replace(".", "/")
        candidates = (f"{base}.py", f"{base}/__init__.py" if base else "__init__.py")
        return next((path for path in candidates if self._read(path) is not None), None)

    def definition(self, place: Place) -> Place | None:
        """Where the class or function of that name is really defined, through imports; None for other things."""
        path, name = place
        for _ in range(20):
            module = self.module(path)
            if module is None:
                return None
            if name in module.defined:
                return path, name
            if name in module.imports:
                path, name = module.imports[name]
            elif self.ours(path) and self._read(stock_path(path)[:-3] + "_stock.py") is not None and _forwards(module):
                path = path[:-3] + "_stock.py"
            else:
                return None
        raise AssertionError(f"{place} is imported in a circle")

    def bases(self, place: Place) -> list[Place]:
        """The classes of vllm from which the class at place derives directly."""
        module = self.module(place[0])
        assert module is not None
        node = module.defined[place[1]]
        assert isinstance(node, ast.ClassDef), place
        found = [self.meaning(place[0], base.value if isinstance(base, ast.Subscript) else base) for base in node.bases]
        return [base for base in found if base is not None and self._is_class(base)]

    def _is_class(self, place: Place) -> bool:
        module = self.module(place[0])
        return module is not None and isinstance(module.defined.get(place[1]), ast.ClassDef)

    def meaning(self, path: str, node: ast.expr) -> Place | None:
        """The class or function that an expression in path names; ``module.Name`` and ``Name`` are understood."""
        module = self.module(path)
        assert module is not None
        if isinstance(node, ast.Name):
            return self.definition((path, node.id)) if node.id in module.defined or node.id in module.imports else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = module.imports.get(node.value.id)
            if owner is not None and not owner[1]:
                return self.definition((owner[0], node.attr))
        return None

    def inherited(self, place: Place, method: str) -> Place | None:
        """The method of stock that a class of ours at place gets, or would get if it did not define it itself."""
        for base in self.bases(place):
            module = self.module(base[0])
            assert module is not None
            node = module.defined[base[1]]
            assert isinstance(node, ast.ClassDef)
            if not self.ours(base[0]) and any(isinstance(s, _FUNCTIONS) and s.name == method for s in node.body):
                return base[0], f"{base[1]}.{method}"
            if found := self.inherited(base, method):
                return found
        return None


class Uses:
    """The symbols of stock that the file of ours at path stands on: (stock path, dotted name) -> how."""

    def __init__(self, sources: Sources, path: str) -> None:
        self._sources = sources
        self._path = path
        module = sources.module(path)
        assert module is not None, path
        self._module = module

    @cached_property
    def found(self) -> dict[Place, str]:
        """For each symbol the first reason that is found."""
        found: dict[Place, str] = {}
        for place, how in [*self._taken_names(), *self._methods(), *self._names()]:
            if place is not None and not self._sources.ours(place[0]):
                found.setdefault((stock_path(place[0]), place[1]), how)
        return found

    def _taken_names(self) -> Iterator[tuple[Place | None, str]]:
        """Names of the target that this module gives another meaning."""
        if self._path.startswith("overlay/"):
            return
        sibling = self._path[:-3] + "_stock.py"
        for name in {*self._module.defined, *_module_imports(self._module)}:
            place = self._sources.definition((sibling, name)) if self._sources.module(sibling) else None
            if place is not None and place[0] == sibling and place != self._sources.definition((self._path, name)):
                yield place, "takes its name"

    def _methods(self) -> Iterator[tuple[Place | None, str]]:
        for name, node in self._module.defined.items():
            if not isinstance(node, ast.ClassDef):
                continue
            for statement in node.body:
                if isinstance(statement, _FUNCTIONS):
                    yield self._sources.inherited((self._path, name), statement.name), f"overridden by {name}"
            for call in ast.walk(node):
                if isinstance(call, ast.Attribute) and _is_super(call.value):
                    yield self._sources.inherited((self._path, name), call.attr), f"called by super() in {name}"

    def _names(self) -> Iterator[tuple[Place | None, str]]:
        """What is used outside an annotation, and what is rebound."""
        for node in _without_annotations(self._module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "rebind":
                yield self._rebound(node), "rebound"
            elif isinstance(node, ast.Attribute):
                owner = self._sources.meaning(self._path, node.value)
                if owner is not None and self._sources.definition(owner):
                    yield self._member(owner, node.attr), "used"
                yield self._sources.meaning(self._path, node), "used"
            elif isinstance(node, ast.Name):
                yield self._sources.meaning(self._path, node), "used"

    def _member(self, owner: Place, name: str) -> Place | None:
        module = self._sources.module(owner[0])
        node = module.defined.get(owner[1]) if module else None
        if isinstance(node, ast.ClassDef) and any(isinstance(s, _FUNCTIONS) and s.name == name for s in node.body):
            return owner[0], f"{owner[1]}.{name}"
        return None

    def _rebound(self, call: ast.Call) -> Place | None:
        owner, name = call.args[0], call.args[1]
        assert isinstance(name, ast.Constant), ast.unparse(call)
        attribute = ast.Attribute(owner, str(name.value), ast.Load())
        if found := self._sources.meaning(self._path, attribute):
            return found
        cls = self._sources.meaning(self._path, owner)
        assert cls is not None, f"{self._path}: cannot tell what {ast.unparse(call)} rebinds"
        return self._member(cls, str(name.value))


def stock_path(path: str) -> str:
    """Where stock had the file that an applied tree may hold as ``x_stock.py``."""
    return path.removesuffix("_stock.py") + ".py" if path.endswith("_stock.py") else path


def _own_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module's body, those under ``if`` and ``try`` too."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, (ast.If, ast.Try)):
                yield from _own_statements(getattr(statement, part, []))


def _module_imports(module: Module) -> list[str]:
    statements = [s for s in _own_statements(module.tree.body) if isinstance(s, ast.ImportFrom)]
    return [alias.asname or alias.name for statement in statements for alias in statement.names]


def _forwards(module: Module) -> bool:
    return "__getattr__" in module.defined


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below node that run."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from _without_annotations(child)
