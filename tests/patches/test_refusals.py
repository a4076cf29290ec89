"""What the engine will not touch: one clear line, exit status 2, and the tree as it was."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from patches.engine.errors import Refused
from patches.engine.locate import find_tree
from patches.engine.transaction import locked
from tests.helpers.overlay_world import EDIT, REPOSITORY, STOCK, World, copy_tree, differences, row, snapshot, write
from tests.helpers.private_mounts import in_private_mounts, mount_read_only

UNKNOWN = "install a supported vLLM"


SCHEDULER, CONFIG = STOCK["core/scheduler.py"], STOCK["config.py"]
CHANGED_METHOD = SCHEDULER.replace('"stock"', '"other"')
CHANGED_BASE = SCHEDULER.replace("Scheduler:", "Scheduler(dict):")


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("core/scheduler.py", CHANGED_METHOD, "FOREIGN: core/scheduler.py Scheduler.schedule is ["),
        ("core/scheduler.py", "class Scheduler:\n    pass\n", "FOREIGN: core/scheduler.py has no Scheduler.schedule"),
        ("core/scheduler.py", CHANGED_BASE, "Scheduler is [class dict], stock has [class ]"),
        ("core/scheduler.py", "not python", "FOREIGN: core/scheduler.py has no Scheduler"),
        ("core/scheduler_stock.py", "x = 1\n", "FOREIGN: core/scheduler_stock.py exists and is not ours: move it away"),
        ("overlay/__init__.py", "x = 1\n", "FOREIGN: a file that is not ours lies where ours belongs"),
        ("config.py", CONFIG.replace("return LIMIT", "return 7"), "config.py: FOREIGN: config.py Config.limit is ["),
    ],
)
def test_foreign_file(world: World, path: str, text: str, message: str) -> None:
    world.stock(path, text)
    for command in ("plan", "status", "apply"):
        printed = world.refused(command)
        assert message in printed, f"{command} printed:\n{printed}"
        assert printed.count("refused: ") == 1, f"one cause, several lines:\n{printed}"
    assert f"nothing in {world.tree} was touched" in printed


def test_foreign_shows_both_digests(world: World) -> None:
    world.stock("core/scheduler.py", CHANGED_METHOD)
    line = next(line for line in world.refused().splitlines() if "FOREIGN" in line)
    stock = world.stock_table()["core/scheduler.py"]["pin-a"]["symbols"]["Scheduler.schedule"]["digest"]
    assert f"stock has [{stock}]" in line
    assert UNKNOWN in line


def test_missing_stock_file(world: World) -> None:
    (world.tree / "sampler.py").unlink()
    printed = world.refused()
    assert "sampler.py: MISSING: sampler.py, which has the row's symbol sample, is gone: install vLLM 0.6.3" in printed


def test_original_lost(world: World) -> None:
    world.must("apply")
    (world.tree / "sampler_stock.py").unlink()
    assert "sampler.py: MISSING: sampler.py, which" in world.refused()
    assert "sampler_stock.py, the stock file that sampler.py replaced, is gone: install vLLM" in world.refused("revert")
    assert "not verified: sampler_stock.py is in the receipt and does not exist" in world.refused("verify")


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_target_is_no_plain_file(world: World, kind: str) -> None:
    target = world.tree / "sampler.py"
    if kind == "link":
        target.rename(world.tree / "elsewhere.py")
        target.symlink_to("elsewhere.py")
    else:
        target.unlink()
        target.mkdir()
    assert "sampler.py: FOREIGN: " in world.refused()


def test_addition_whose_target_stock_has(world: World) -> None:
    world.must("apply")
    rows = tuple(r for r in world.layout.overlays if r.id != "fast-sampler")
    world.set_rows((*rows, row("fast-sampler", "addition", "sampler.py")))
    assert "sampler.py: FOREIGN: stock has a file of that name, so the row is no addition" in world.refused()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "-        return LIMIT\n",
            "-        return LIMITS\n",
            "hunk 1 (line 4, 'class Config:' and following) fits nowhere",
        ),
        ("@@ -4,7 +4,7 @@", "@@ -4,9 +4,7 @@", "is cut off"),
        ("@@ -4,7 +4,7 @@", "@@ -4,3 +4,7 @@", "line 7 does not fit its hunk's line counts"),
        ("@@", "", "is no unified diff"),
    ],
)
def test_edit_that_does_not_fit(world: World, old: str, new: str, message: str) -> None:
    (world.layout.edits / "config.py.patch").write_text(EDIT.replace(old, new))
    assert f"config.py: FOREIGN: patches/edits/config.py.patch {message}" in world.refused()


def test_two_trees(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy_tree(world.tree, world.repository / "other" / "vllm").parent
    monkeypatch.setattr(sys, "path", [str(world.tree.parent), str(other)])
    with pytest.raises(
        Exception, match=f"two different vllm trees on the search path, {world.tree} and {other / 'vllm'}: .* --root"
    ):
        find_tree()
    assert find_tree(str(other / "vllm")) == other / "vllm"
    assert find_tree(first=True) == world.tree
    (warning,) = capsys.readouterr().out.splitlines()
    assert warning.startswith(f"warning: {other / 'vllm'} is another vllm tree on the search path and is left alone: ")


def test_links_to_one_tree_are_one_tree(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vendor image has its packages under two names."""
    link = world.repository / "link"
    link.symlink_to(world.tree.parent)
    monkeypatch.setattr(sys, "path", [str(link), str(world.tree.parent), "", "/nowhere"])
    assert find_tree() == world.tree


def test_second_tree_behind_a_link(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names, two trees; the line has the name that the user knows too."""
    other = copy_tree(world.tree, world.repository / "other" / "vllm")
    link = world.repository / "packages"
    link.mkdir()
    (link / "vllm").symlink_to(other)
    monkeypatch.setattr(sys, "path", [str(world.tree.parent), str(link)])
    with pytest.raises(Refused, match=f"trees on .*, {world.tree} and {other} .by the link {link / 'vllm'}.: take one"):
        find_tree()


def test_no_tree(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(world.repository)])
    with pytest.raises(Exception, match="no vllm on the search path of .*PYTHON="):
        find_tree()
    with pytest.raises(Exception, match="is no vllm package"):
        find_tree(str(world.repository))


def test_readonly_folder(world: World) -> None:
    """Another user's tree. Root could write it all the same, so its override is dropped in the child."""
    before = snapshot(world.tree)
    folder = world.tree / "core"
    folder.chmod(0o555)
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from pathlib import Path\n"
        "from patches.engine.errors import Refused\n"
        "from patches.engine.files import Content\n"
        "from patches.engine.transaction import change\n"
        "changes = {'engine.py': Content(b''), 'core/scheduler.py': Content(b'')}\n"
        f"try: change(Path({str(world.tree)!r}), changes, 'apply')\n"
        "except Refused as no: print(no)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-c", code], capture_output=True, text=True, preexec_fn=_obey_permissions
        )
    finally:
        folder.chmod(0o755)
    assert done.stdout == f"no permission to write in {folder}: run as its owner, or make it writable\n", done.stderr
    assert differences(before, snapshot(world.tree)) == []


def test_readonly_mount(world: World) -> None:
    """Permission bits do not bind root, a mount does. Looking is allowed; nothing is tried."""

    def look_and_apply() -> list[tuple[int, str]]:
        mount_read_only(world.tree.parent)
        return [world.run(command) for command in ("plan", "status", "verify", "apply", "apply-and-verify")]

    before = snapshot(world.tree)
    statuses = in_private_mounts(look_and_apply)
    assert [status for status, _ in statuses] == [0, 0, 2, 2, 2], statuses
    for _, printed in statuses[3:]:
        assert printed == f"refused: {world.tree} lies on a read-only file system: mount it writable\n"
    assert differences(before, snapshot(world.tree)) == []
    world.must("apply")
    applied = snapshot(world.tree)

    def look_and_revert() -> list[tuple[int, str]]:
        mount_read_only(world.tree / "core")
        return [world.run(command) for command in ("status", "verify", "apply", "revert")]

    statuses = in_private_mounts(look_and_revert)
    assert [status for status, _ in statuses] == [0, 0, 0, 2], statuses
    assert statuses[3][1] == f"refused: {world.tree / 'core'} lies on a read-only file system: mount it writable\n"
    assert differences(applied, snapshot(world.tree)) == []


def test_readonly_file_in_a_writable_folder(world: World) -> None:
    """A single file mounted into a container cannot be replaced; that shows half-way, and all is undone."""
    before = snapshot(world.tree)

    def apply() -> tuple[int, str, list[str]]:
        mount_read_only(world.tree / "core/scheduler.py")
        return (*world.run("apply"), differences(before, snapshot(world.tree)))

    status, printed, left = in_private_mounts(apply)
    assert (status, left) == (2, [])
    assert "refused: apply failed ([Errno 16]" in printed and "and everything was undone: remove the cause" in printed
    assert printed.count("\n") == 1, printed


def test_crlf_everywhere(world: World) -> None:
    """A checkout that turned every line ending: one line, which says what to do."""
    sources = [world.layout.edits / "config.py.patch", *world.layout.overrides.rglob("*.*")]
    for file in sources:
        file.write_bytes(file.read_bytes().rstrip(b"\n").replace(b"\n", b"\r\n") + b"\r\n")
    lines = world.refused().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("refused: CRLF line endings in patches/edits/config.py.patch, vllm_overrides/core/sch")
    command = lines[0].split("`")[1]
    folder = world.layout.overrides.parent
    subprocess.run(["bash", "-c", command], cwd=folder, check=True)
    world.must("apply")


def test_many_files_with_crlf_are_one_line(world: World) -> None:
    for number in range(20):
        world.source(f"overlay/kernels/x{number}.py", "X = 1\r\n")
    printed = world.refused()
    assert "and 15 more: take a fresh git clone, or `grep" in printed and printed.count("\n") == 1, printed


def test_incomplete_repository(world: World) -> None:
    """A build whose context left the sources out."""
    world.layout.overrides.rename(world.repository / "elsewhere")
    printed = world.refused()
    assert printed == f"refused: {world.layout.overrides} does not exist: take the whole repository along\n"


def test_edit_in_another_encoding(world: World) -> None:
    edit = world.layout.edits / "config.py.patch"
    edit.write_bytes(edit.read_bytes().replace(b"# ours", b"# \xfcnser"))
    assert "config.py: FOREIGN: patches/edits/config.py.patch is no UTF-8 (" in world.refused()


def test_broken_journal(world: World) -> None:
    for text in ("{", "[]", '{"action": 1}'):
        write(world.tree / ".vllm-overlay-journal/journal.json", text)
        printed = world.refused("status")
        assert "journal is broken (" in printed and "install vLLM 0.6.3 anew" in printed and printed.count("\n") == 1


def test_two_at_a_time(world: World) -> None:
    with locked(world.tree):
        assert f"another patch_ops.sh is working on {world.tree}: wait for it" in world.refused()
    world.must("apply")


def _obey_permissions() -> None:
    if os.geteuid() == 0:
        drop, override, read_search = 24, 1, 2  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        library = ctypes.CDLL(None, use_errno=True)
        for capability in (override, read_search):
            if library.prctl(drop, capability, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")
