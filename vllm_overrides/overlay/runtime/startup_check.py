"""Before a server starts: is the tree that it runs from the one that the receipt describes, and are our classes in use?

Only the deployed tree is needed, not the repository it was made from.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import vllm
from vllm.overlay.rebind import lost_rebindings

_TREE = Path(vllm.__file__).resolve().parent
_JOURNAL = ".vllm-overlay-journal"
_ADVICE = "run `bash patch_ops.sh apply` with this interpreter"


def check_deployed(import_targets: bool = True) -> str:
    """Returns what is deployed, for the start line: pin, number of overlays, manifest hash.

    import_targets: also import every stock module that we changed and see that it is ours and that the rest of vllm
    uses it. Raises SystemExit with one line at the first mismatch.
    """
    receipt = _receipt()
    for problem in _problems(receipt, import_targets):
        raise SystemExit(f"vllm overlay: {problem}: {_ADVICE}")
    drift = f", drift in {len(receipt['drift'])} files" if receipt["drift"] else ""
    return f"pin {receipt['pin']}, {receipt['count']} overlays, manifest {receipt['manifest'][:12]}{drift}"


def check_target(path: str) -> None:
    """Imports one deployed file (path below ``vllm/``). Raises AssertionError unless it is ours and in use."""
    for overlay in _receipt()["overlays"]:
        if path in [file["path"] for file in overlay["files"]]:
            problems = list(_import_problems(overlay, path))
            assert not problems, "; ".join(problems)
            return
    raise AssertionError(f"{path} is not in the receipt")


def _receipt() -> dict[str, Any]:
    path = _TREE / "overlay" / "receipt.json"
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
        agrees = receipt["manifest"] == _manifest_hash(receipt) and receipt["count"] == len(receipt["overlays"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"vllm overlay: no usable receipt ({error!r}): {_ADVICE}") from None
    if not agrees:
        raise SystemExit(f"vllm overlay: the receipt does not agree with itself: {_ADVICE}")
    return receipt


def _problems(receipt: dict[str, Any], import_targets: bool) -> Iterator[str]:
    if (_TREE / _JOURNAL).exists():
        yield "an apply or revert was killed half-way"
    for overlay in receipt["overlays"]:
        for file in overlay["files"]:
            yield from _file_problems(file["path"], file["sha256"])
            if file["kept"]:
                yield from _file_problems(file["kept"], file["kept_sha256"])
    if import_targets:
        for overlay in receipt["overlays"]:
            if overlay["kind"] != "addition":
                for file in overlay["files"]:
                    yield from _import_problems(overlay, file["path"])
        for name in lost_rebindings():
            yield f"{name} was rebound by an overlay and has been rebound by something else"


def _manifest_hash(receipt: dict[str, Any]) -> str:
    lines = [f"{o['id']} {o['kind']} {f['path']} {f['source']}\n" for o in receipt["overlays"] for f in o["files"]]
    return _sha256("".join(sorted(lines)).encode())


def _file_problems(path: str, expected: str) -> Iterator[str]:
    file = _TREE / path
    if not file.is_file():
        yield f"vllm/{path} is in the receipt and does not exist"
    elif _sha256(file.read_bytes()) != expected:
        yield f"vllm/{path} is not the file that was deployed"


def _import_problems(overlay: dict[str, Any], path: str) -> Iterator[str]:
    name = _module_name(path)
    module = importlib.import_module(name)
    source = Path(module.__file__ or "")
    if source.resolve() != _TREE / path:
        yield f"{name} was imported from {source}, not from {_TREE / path}"
        return
    if f"vllm-overlay: {overlay['id']}" not in source.read_text(encoding="utf-8").splitlines()[-1]:
        yield f"{source} lacks the marker of {overlay['id']}"
    if overlay["kind"] == "extension":
        stock = importlib.import_module(f"{name}_stock")
        own = _names_bound_in(source)
        for symbol in overlay["symbols"]:
            if ":" not in symbol:
                yield from _symbol_problems(module, stock, symbol, own)


def _symbol_problems(module: ModuleType, stock: ModuleType, symbol: str, own: set[str]) -> Iterator[str]:
    """A symbol that ours defines must be ours, for everybody who imported it too; others must be forwarded."""
    top = symbol.partition(".")[0]
    value: Any = module
    for part in symbol.split("."):
        value = getattr(value, part, None)
    if value is None:
        yield f"{module.__name__} has no {symbol}"
    if top not in own:
        return
    ours = getattr(module, top)
    if getattr(ours, "__module__", module.__name__) != module.__name__:
        yield f"{module.__name__}.{top} is {ours.__module__}'s, not ours"
    theirs = getattr(stock, top, None)
    for user in list(sys.modules.values()):
        outside = getattr(user, "__name__", "").startswith("vllm.") and user not in (module, stock)
        if outside and theirs is not ours and vars(user).get(top) is theirs:
            yield f"{user.__name__}.{top} is stock's, although {module.__name__}.{top} replaces it"


def _names_bound_in(source: Path) -> set[str]:
    """Classes and functions that the module itself defines."""
    body = ast.parse(source.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))}


def _module_name(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    return ".".join(["vllm", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
