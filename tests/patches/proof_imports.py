"""Third proof that the overlay is in use: fresh interpreters import each target and say whose classes they got.

usage: python proof_imports.py VLLM_FOLDER < NAMES   (exit status 1 and one line per target that is not ours)

NAMES: the modules, none of them vllm's, that vllm imports, in that order.

Every target that stock has is the first vllm module of an interpreter of its own, because what is imported first
decides in which order stock and ours meet; the additions share one. The interpreters are forks of this one, which has
imported all that vllm imports but nothing of vllm, so that each costs half a second and not six.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path


def main(tree: Path) -> int:
    """Checks the applied tree; 0 when every target is ours."""
    sys.path.insert(0, str(tree.parent))
    for name in sys.stdin.read().split():
        importlib.import_module(name)
    assert "vllm" not in sys.modules, "these interpreters would not be fresh"
    receipt = json.loads((tree / "overlay/receipt.json").read_text(encoding="utf-8"))
    alone, together = [], []
    for overlay in receipt["overlays"]:
        paths = [file["path"] for file in overlay["files"] if file["path"].endswith(".py")]
        if overlay["kind"] == "addition":
            together += paths
        else:
            alone += [[path] for path in paths]
    failed = [group for group in [*alone, together] if not in_a_fork(group, tree)]
    print(
        f"{len(alone)} changed and {len(together)} added modules of {tree}, {len(failed)} interpreters failed: {failed}"
    )
    return int(bool(failed))


def in_a_fork(paths: list[str], tree: Path) -> bool:
    """Whether the targets are ours in an interpreter that has imported nothing of vllm before."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for path in paths:
                check(path, tree)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def check(path: str, tree: Path) -> None:
    """Imports the target first, and only then what judges it."""
    module = importlib.import_module("vllm." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    assert Path(module.__file__ or "").resolve() == (tree / path).resolve(), f"{path} came from {module.__file__}"
    last = Path(module.__file__).read_text(encoding="utf-8").splitlines()[-1]
    assert last.startswith("# vllm-overlay: "), f"{path} ends with {last!r}"
    importlib.import_module("vllm.overlay.runtime.startup_check").check_target(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
