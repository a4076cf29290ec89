"""Apply, verify and revert on a synthetic vllm."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.helpers.overlay_world import SOURCES, STOCK, World, differences, snapshot


def test_apply_deploys_every_kind(world: World) -> None:
    printed = world.must("apply")
    assert "applied: 11 changes, 5 overlays, pin pin-a|pin-b" in printed
    deployed = {path: (world.tree / path).read_text() for path in [*SOURCES, "config.py"]}
    assert deployed["core/scheduler.py"] == SOURCES["core/scheduler.py"] + "# vllm-overlay: better-order\n"
    assert deployed["overlay/kernels/__init__.py"] == "NAME = 'kernels'\n# vllm-overlay: kernels\n"
    assert deployed["overlay/kernels/csrc/kernel.cpp"].endswith("}\n// vllm-overlay: kernels\n")
    assert deployed["overlay/kernels/README.md"].endswith("Kernels\n<!-- vllm-overlay: kernels -->\n")
    assert deployed["sampler.py"] == SOURCES["sampler.py"] + "# vllm-overlay: fast-sampler\n"
    edited = STOCK["config.py"].replace("return LIMIT", "return LIMIT + 1  # ours") + "# vllm-overlay: higher-limit\n"
    assert deployed["config.py"] == edited
    for path in ("core/scheduler", "config", "sampler"):
        assert (world.tree / f"{path}_stock.py").read_text() == STOCK[f"{path}.py"], path


def test_interpreter_uses_ours(world: World) -> None:
    world.must("apply")
    code = "from vllm import engine, config; print(engine.start(), engine.Scheduler().order(), config.Config().limit())"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=world.tree.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "ours stock helper 2\n"


def test_second_apply_changes_nothing(world: World) -> None:
    world.must("apply")
    before = snapshot(world.tree)
    assert "applied: 0 changes" in world.must("apply")
    assert differences(before, snapshot(world.tree)) == []


def test_default_command_applies_and_verifies(world: World) -> None:
    printed = world.must("")
    assert "applied: 11 changes" in printed
    assert "verified: hashes and markers of 7 files" in printed


def test_revert_brings_back_stock(world: World) -> None:
    (world.tree / "sampler.py").chmod(0o600)
    before = snapshot(world.tree)
    world.must("apply")
    assert (world.tree / "sampler.py").stat().st_mode & 0o777 == 0o600
    assert "reverted: 11 changes" in world.must("revert")
    assert differences(before, snapshot(world.tree)) == []
    assert "reverted: 0 changes" in world.must("revert")


def test_compiled_files_of_touched_modules_go(world: World) -> None:
    """Python trusts a .pyc whose size and time match, so none may survive that was made from another source."""
    before = snapshot(world.tree)
    command = [sys.executable, "-m", "compileall", "-q", str(world.tree)]
    for step in ("apply", "revert"):
        subprocess.run(command, check=True)
        world.must(step)
        compiled = sorted(path.name.split(".")[0] for path in world.tree.rglob("*.pyc"))
        assert compiled == ["__init__", "__init__", "engine"], f"after {step}: {compiled}"
    for cache in list(world.tree.rglob("__pycache__")):
        for file in cache.iterdir():
            file.unlink()
        cache.rmdir()
    assert differences(before, snapshot(world.tree)) == []


def test_crlf_stock_stays_crlf(world: World) -> None:
    for path, text in STOCK.items():
        world.stock(path, text.replace("\n", "\r\n"))
    before = snapshot(world.tree)
    world.must("")
    edited = (world.tree / "config.py").read_bytes()
    assert edited.count(b"\n") == edited.count(b"\r\n") == STOCK["config.py"].count("\n") + 1, edited
    assert b"return LIMIT + 1  # ours\r\n" in edited
    assert edited.endswith(b"# vllm-overlay: higher-limit\r\n")
    assert b"\r" not in (world.tree / "core/scheduler.py").read_bytes()
    world.must("revert")
    assert differences(before, snapshot(world.tree)) == []


def test_changed_source_is_applied_from_stock_again(world: World) -> None:
    before = snapshot(world.tree)
    world.must("apply")
    world.source("core/scheduler.py", SOURCES["core/scheduler.py"] + "NEW = 1\n")
    edit = world.layout.edits / "config.py.patch"
    edit.write_text(edit.read_text().replace("LIMIT + 1", "LIMIT + 2"))
    status, printed = world.run("status")
    assert status == 0
    assert "STALE    extension   core/scheduler.py" in printed
    assert "not up to date: apply would change 3 files" in printed
    assert "applied: 3 changes" in world.must("")
    assert "NEW = 1" in (world.tree / "core/scheduler.py").read_text()
    assert "LIMIT + 2  # ours" in (world.tree / "config.py").read_text()
    world.must("revert")
    assert differences(before, snapshot(world.tree)) == []


def test_edited_deployed_file_is_made_anew(world: World) -> None:
    world.must("apply")
    file = world.tree / "core/scheduler.py"
    deployed = file.read_text()
    file.write_text("x = 1\n" + deployed)
    assert "core/scheduler.py is not as the sources say" in world.refused("verify")
    assert "applied: 1 changes" in world.must("apply")
    assert file.read_text() == deployed


def test_row_taken_out_is_undone_by_the_next_apply(world: World) -> None:
    world.must("apply")
    world.keep_rows("package", "higher-limit")
    status, printed = world.run("plan")
    assert status == 0
    assert "STALE    no row      core/scheduler.py  better-order" in printed
    world.must("")
    assert not (world.tree / "overlay/kernels").exists()
    for path in ("core/scheduler.py", "sampler.py"):
        assert (world.tree / path).read_text() == STOCK[path]
        assert not (world.tree / path.replace(".py", "_stock.py")).exists()
    assert [overlay["id"] for overlay in read_receipt(world)["overlays"]] == ["package", "higher-limit"]


def test_row_that_changes_its_kind(world: World) -> None:
    world.must("apply")
    rows = tuple(row for row in world.layout.overlays if row.id != "fast-sampler")
    new = [row for row in world.layout.overlays if row.id == "fast-sampler"][0]
    world.set_rows((*rows, type(new)(**{**vars(new), "id": "other-sampler", "kind": "extension"})))
    world.must("")
    assert (world.tree / "sampler.py").read_text().endswith("# vllm-overlay: other-sampler\n")
    assert (world.tree / "sampler_stock.py").read_text() == STOCK["sampler.py"]


def test_lost_receipt_is_written_anew(world: World) -> None:
    before = snapshot(world.tree)
    world.must("apply")
    (world.tree / "overlay/receipt.json").unlink()
    assert "overlay/receipt.json does not exist: run" in world.refused("verify")
    assert "applied: 1 changes" in world.must("")
    (world.tree / "overlay/receipt.json").write_text("{")
    assert "overlay/receipt.json is broken" in world.refused("verify")
    assert "applied: 1 changes" in world.must("")
    (world.tree / "overlay/receipt.json").unlink()
    world.must("revert")
    assert differences(before, snapshot(world.tree)) == []


def test_vllm_installed_anew_over_ours(world: World) -> None:
    """An installer puts its own files back and leaves ours, so the originals we moved aside are without use."""
    before = snapshot(world.tree)
    for next_step in ("apply", "revert"):
        world.must("apply")
        for path in ("core/scheduler.py", "config.py", "sampler.py"):
            (world.tree / path).unlink()
            world.stock(path, STOCK[path])
        world.must(next_step)
    left = [
        line
        for line in differences(before, snapshot(world.tree))
        if not line.startswith(("core/sch", "config", "sampler"))
    ]
    assert left == []
    assert {path: (world.tree / path).read_text() for path in STOCK} == STOCK
    assert list(world.tree.rglob("*_stock.py")) == []


def test_receipt(world: World) -> None:
    world.must("apply")
    receipt = read_receipt(world)
    assert receipt["engine"] == "1"
    assert receipt["pin"] == "pin-a|pin-b"
    assert receipt["count"] == 5
    assert receipt["drift"] == {}
    assert len(receipt["manifest"]) == 64
    files = {file["path"]: file for overlay in receipt["overlays"] for file in overlay["files"]}
    assert sorted(files) == sorted([*SOURCES, "config.py"])
    assert files["config.py"]["kept"] == "config_stock.py"
    assert files["overlay/__init__.py"]["kept"] is None
    before = receipt["manifest"]
    world.source("sampler.py", "def sample():\n    return 'faster'\n")
    world.must("apply")
    assert read_receipt(world)["manifest"] != before


def test_files_of_others_in_our_folder_stay(world: World) -> None:
    world.must("apply")
    world.stock("overlay/kernels/built.so", "binary")
    printed = world.must("revert")
    assert "holds files that are not ours: kernels" in printed
    assert (world.tree / "overlay/kernels/built.so").exists()


def read_receipt(world: World) -> dict:
    return json.loads((world.tree / "overlay/receipt.json").read_text())
