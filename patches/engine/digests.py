"""Digests of syntax trees: comments, layout and line endings do not count, and Python 3.10 to 3.13 agree."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from typing import Any

# Fields that some Python versions lack or fill differently, and that carry no meaning of their own.
_LEFT_OUT = {"type_params", "type_comment", "kind", "ctx", "type_ignores"}


@dataclass(frozen=True)
class Digests:
    """Of one source file. whole: 16 hex digits.

    symbols: dotted name -> 16 hex digits for a function, ``class Base, ...`` for a class.
    """

    whole: str
    symbols: dict[str, str]


def digest_source(data: bytes) -> Digests:
    """Digests of the Python source in data (any line ending). Raises SyntaxError."""
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    tree = ast.parse(text)
    symbols: dict[str, str] = {}
    _collect(tree, "", symbols)
    return Digests(_digest(tree), symbols)


def _collect(node: ast.AST, prefix: str, symbols: dict[str, str]) -> None:
    """Functions and classes directly in a module or class body; a name bound twice keeps its last meaning."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.ClassDef):
            symbols[prefix + child.name] = class_value([ast.unparse(base) for base in child.bases])
            _collect(child, prefix + child.name + ".", symbols)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            symbols[prefix + child.name] = _digest(child)


def class_value(bases: list[str]) -> str:
    """How a class is written in a table of symbols: it has no digest of its own, its methods have."""
    return "class " + ", ".join(bases)


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(repr(_flat(node)).encode()).hexdigest()[:16]


def _flat(node: Any) -> Any:
    """The tree as nested tuples."""
    if isinstance(node, ast.JoinedStr):
        return ("JoinedStr", _flat_fstring(node))
    if isinstance(node, ast.AST):
        return (type(node).__name__, tuple((f, _flat(v)) for f, v in ast.iter_fields(node) if f not in _LEFT_OUT))
    if isinstance(node, list):
        return tuple(_flat(value) for value in node)
    return repr(node)


def _flat_fstring(node: ast.JoinedStr) -> tuple[Any, ...]:
    """The parts of an f-string with neighbouring constants joined, because Python versions split them differently."""
    parts: list[Any] = []
    for value in node.values:
        if not isinstance(value, ast.Constant):
            parts.append(_flat(value))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += str(value.value)
        elif value.value != "":
            parts.append(str(value.value))
    return tuple(parts)
