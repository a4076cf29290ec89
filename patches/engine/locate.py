"""Where the installed vLLM lies, found without importing it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

from patches.engine.errors import Refused


def find_tree(root: str | None = None, first: bool = False) -> Path:
    """The folder of the ``vllm`` package, symbolic links resolved.

    root: that folder itself, when the caller knows better than the search path. first: of several trees, take the one
    that ``import vllm`` would take here, and name the others; for callers who know that the server has the same search
    path. Raises Refused when there is none, or when, without first, the search path holds two different ones: which of
    them a server would run depends on its own search path, so guessing is unsafe.
    """
    if root is not None:
        tree = Path(root).resolve()
        if not (tree / "__init__.py").is_file():
            raise Refused(f"{tree} is no vllm package (it has no __init__.py): name the folder vllm itself")
        return tree
    trees = _trees_on_path()
    if not trees:
        raise Refused(
            f"no vllm on the search path of {sys.executable}: install it, or choose the interpreter with PYTHON="
        )
    if first:
        taken, *others = trees.values()
        for name in others:
            print(f"warning: {name} is another vllm tree on the search path and is left alone: {taken} comes first")
        return next(iter(trees))
    if len(trees) > 1:
        raise Refused(
            f"two different vllm trees on the search path, {' and '.join(trees.values())}: "
            "take one away, or say which with --root, or --first for the one that this interpreter would import"
        )
    return next(iter(trees))


def _trees_on_path() -> dict[Path, str]:
    """Every distinct tree and how to call it, the one that ``import vllm`` would take first."""
    specs = [importlib.util.find_spec("vllm")]  # asks also the finders of editable installs, which are on no path entry
    specs += [importlib.machinery.PathFinder.find_spec("vllm", [entry]) for entry in sys.path]
    trees: dict[Path, str] = {}
    for spec in specs:
        if spec is not None and spec.origin:
            named = Path(spec.origin).parent
            tree = Path(spec.origin).resolve().parent
            trees.setdefault(tree, str(tree) if named == tree else f"{tree} (by the link {named})")
    return trees
