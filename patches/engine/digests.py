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
    written: dict[ast.AST, str] = {}  # functions lie inside the module: each is written once
    whole = _hash(_written(tree, written))
    symbols: dict[str, str] = {}
    _collect(tree, "", symbols, written)
    return Digests(whole, symbols)


def _collect(node: ast.AST, prefix: str, symbols: dict[str, str], written: dict[ast.AST, str]) -> None:
    """Functions and classes directly in a module or class body; a name bound twice keeps its last meaning."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.ClassDef):
            symbols[prefix + child.name] = class_value([ast.unparse(base) for base in child.bases])
            _collect(child, prefix + child.name + ".", symbols, written)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            symbols[prefix + child.name] = _hash(written[child])


def class_value(bases: list[str]) -> str:
    """How a class is written in a table of symbols: it has no digest of its own, its methods have."""
    return "class " + ", ".join(bases)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _written(node: Any, written: dict[ast.AST, str]) -> str:
    """The tree as the repr of nested tuples, which is how the table of stock symbols was made."""
    if isinstance(node, ast.JoinedStr):
        return _tuple(["'JoinedStr'", _tuple(_parts(node, written))])
    if isinstance(node, ast.AST):
        fields = [
            f"({field!r}, {_written(value, written)})"
            for field, value in ast.iter_fields(node)
            if field not in _LEFT_OUT
        ]
        text = _tuple([repr(type(node).__name__), _tuple(fields)])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            written[node] = text
        return text
    if isinstance(node, list):
        return _tuple([_written(value, written) for value in node])
    return repr(repr(node))


def _tuple(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _parts(node: ast.JoinedStr, written: dict[ast.AST, str]) -> list[str]:
    """The parts of an f-string with neighbouring constants joined, because Python versions split them differently."""
    parts: list[str] = []
    constant = ""
    for value in node.values:
        if isinstance(value, ast.Constant):
            constant += str(value.value)
            continue
        parts += [repr(constant)] if constant else []
        constant = ""
        parts.append(_written(value, written))
    return parts + ([repr(constant)] if constant else [])
