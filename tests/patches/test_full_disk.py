"""A disk that is full, at every size that is too small: one line, and all undone although there is no room for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.overlay_world import STOCK, World, differences, snapshot
from tests.helpers.private_mounts import in_private_mounts, mount_tmpfs, unmount

PAGE = os.sysconf("SC_PAGESIZE")
MOST_PAGES = 200


@pytest.mark.parametrize("limit", ["size", "nr_inodes"])
@pytest.mark.parametrize("step", ["apply", "apply again with other sources", "revert"])
def test_every_size(world: World, step: str, limit: str) -> None:
    for path, text in STOCK.items():  # longer than a page, so that a file can be cut in the middle
        if path.endswith(".py"):
            world.stock(path, text + "# padding\n" * (PAGE // 4))
    if step != "apply":
        world.must("apply")
    if step == "apply again with other sources":
        for path in ("core/scheduler.py", "overlay/kernels/__init__.py"):
            source = world.layout.overrides / path
            source.write_text(source.read_text() + "\n# more\n" * (PAGE // 4))
    seen = in_private_mounts(lambda: _try_sizes(world, step.split()[0], limit))
    failed, left = seen["failed"], seen["left"]
    assert left == [], "not undone"
    assert seen["lines"] == [], "not one line that says what to do"
    assert seen["succeeded"], f"never enough room: {seen}"
    assert failed > (5 if step == "apply" else 1), f"only {failed} sizes were too small"


def _try_sizes(world: World, command: str, limit: str) -> dict:
    source, tree = world.tree, world.repository / "disk" / "vllm"
    tree.parent.mkdir()
    seen: dict = {"failed": 0, "left": [], "lines": [], "succeeded": False}
    for room in range(1, MOST_PAGES):
        mount_tmpfs(tree.parent, f"{limit}={room * PAGE if limit == 'size' else room}")
        if _copied(source, tree):
            before = snapshot(tree)
            world.tree = tree
            status, printed = world.run(command)
            if status == 0:
                seen["succeeded"] = world.run("status")[0] == 0
                unmount(tree.parent)
                return seen
            seen["failed"] += 1
            seen["left"] += [f"{room}: {line}" for line in differences(before, snapshot(tree))]
            if not (printed.startswith(f"refused: {command} failed ([Errno 28]") and printed.count("\n") == 1):
                seen["lines"].append(f"{room}: {printed}")
        unmount(tree.parent)
    return seen


def _copied(source: Path, tree: Path) -> bool:
    """Whether there is room for the tree itself."""
    try:
        shutil.copytree(source, tree)
    except (shutil.Error, OSError):
        return False
    return True
