"""The check that a server makes of itself, in fresh interpreters on a small vllm with our real checks laid over it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from patches.engine import transaction
from tests.helpers.overlay_world import REPOSITORY, SOURCES, World, make_world, row, write

CHECK = "from vllm.overlay.runtime.startup_check import check_deployed; print(check_deployed())"


@pytest.fixture
def world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> World:
    """The small overlay, applied, and in it this project's start-up check and rebinding."""
    world = make_world(tmp_path, capsys)
    for path in ("overlay/rebind.py", "overlay/runtime/startup_check.py"):
        world.source(path, (REPOSITORY / "vllm_overrides" / path).read_text(encoding="utf-8"))
    world.source("overlay/runtime/__init__.py", "")
    ours = (row("checks", "addition", "overlay/runtime/"), row("rebinding", "addition", "overlay/rebind.py"))
    world.set_rows((*world.layout.overlays, *ours))
    world.must("apply")
    return world


def start(world: World, code: str = CHECK) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-B", "-c", code], cwd=world.tree.parent, capture_output=True, text=True)


def test_one_line_when_all_is_right(world: World) -> None:
    done = start(world)
    manifest = json.loads((world.tree / "overlay/receipt.json").read_text())["manifest"]
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout == f"pin pin-a|pin-b, 7 overlays, manifest {manifest[:12]}\n"


def test_drift_is_said(world: World) -> None:
    world.must("revert")
    world.stock("core/scheduler.py", (world.tree / "core/scheduler.py").read_text() + "\n\nNEW = 1\n")
    world.must("apply")
    assert start(world).stdout.endswith(", drift in 1 files\n")


def refusal(world: World, code: str = CHECK) -> str:
    """The one line with which the start ends."""
    done = start(world, code)
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.endswith(": run `bash patch_ops.sh apply` with this interpreter\n"), done.stderr
    return done.stderr


@pytest.mark.parametrize("path", ["overlay/kernels/README.md", "core/scheduler.py", "core/scheduler_stock.py"])
def test_changed_file(world: World, path: str) -> None:
    with (world.tree / path).open("a") as file:
        file.write("\n")
    assert f"vllm/{path} is not the file that was deployed" in refusal(world)


def test_missing_file(world: World) -> None:
    (world.tree / "overlay/kernels/README.md").unlink()
    assert "vllm/overlay/kernels/README.md is in the receipt and does not exist" in refusal(world)


@pytest.mark.parametrize(("old", "new"), [('"count": 7', '"count": 8'), ('"id": "checks"', '"id": "others"')])
def test_receipt_that_disagrees_with_itself(world: World, old: str, new: str) -> None:
    file = world.tree / "overlay/receipt.json"
    file.write_text(file.read_text().replace(old, new))
    assert "the receipt does not agree with itself" in refusal(world)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"overlays": []}'])
def test_no_usable_receipt(world: World, content: str | None) -> None:
    file = world.tree / "overlay/receipt.json"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    assert "no usable receipt" in refusal(world)


def test_receipt_of_another_manifest(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In itself it is in order; the tree is not what it describes."""
    file = world.tree / "overlay/receipt.json"
    ours = file.read_bytes()
    world.source("core/scheduler.py", SOURCES["core/scheduler.py"] + "\n# another\n")
    world.must("apply")
    assert file.read_bytes() != ours
    file.write_bytes(ours)
    assert "vllm/core/scheduler.py is not the file that was deployed" in refusal(world)


def test_interrupted_apply(world: World) -> None:
    (world.tree / transaction.JOURNAL).mkdir()
    assert "an apply or revert was killed half-way" in refusal(world)


def test_module_from_elsewhere(world: World, tmp_path: Path) -> None:
    write(tmp_path / "decoy.py", (world.tree / "core/scheduler.py").read_text())
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('vllm.core.scheduler', {str(tmp_path / 'decoy.py')!r})\n"
        f"import vllm; sys.modules['vllm.core.scheduler'] = module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
    )
    assert f"vllm.core.scheduler was imported from {tmp_path / 'decoy.py'}, not from" in refusal(world, code + CHECK)


def test_module_of_a_second_vllm(world: World, tmp_path: Path) -> None:
    """Found first by a path that somebody put before ours."""
    second = tmp_path / "second/vllm"
    write(second / "core/__init__.py", "")
    write(second / "core/scheduler.py", (world.tree / "core/scheduler_stock.py").read_text())
    code = (
        f"import sys, vllm; vllm.__path__.insert(0, {str(second)!r})\n"
        "for name in ('vllm.core', 'vllm.core.scheduler'): del sys.modules[name]\n"
    )
    assert f"vllm.core.scheduler was imported from {second / 'core/scheduler.py'}, not from {world.tree}" in refusal(
        world, code + CHECK
    )


def test_stock_class_still_in_use(world: World) -> None:
    code = "import vllm.engine, vllm.core.scheduler_stock as s; vllm.engine.Scheduler = s.Scheduler\n"
    assert "vllm.engine.Scheduler is stock's, although vllm.core.scheduler.Scheduler replaces it" in refusal(
        world, code + CHECK
    )


def test_class_that_is_not_ours(world: World) -> None:
    code = "import vllm.core.scheduler as ours; ours.Scheduler = ours._stock.Scheduler\n"
    assert "vllm.core.scheduler.Scheduler is vllm.core.scheduler_stock's, not ours" in refusal(world, code + CHECK)


def test_symbol_that_does_not_resolve(world: World) -> None:
    code = "import vllm.core.scheduler as ours; del ours._stock.Scheduler.schedule, ours.Scheduler.schedule\n"
    assert "vllm.core.scheduler has no Scheduler.schedule" in refusal(world, code + CHECK)


def test_lost_rebinding(world: World) -> None:
    code = (
        "import vllm.core.scheduler_stock as s; from vllm.overlay.rebind import rebind\n"
        "rebind(s, 'helper', 1); s.helper = 2\n"
    )
    assert (
        "vllm.core.scheduler_stock.helper was rebound by an overlay and has been rebound by something else"
        in refusal(world, code + CHECK)
    )


def test_one_target(world: World) -> None:
    code = "from vllm.overlay.runtime.startup_check import check_target; check_target('{}'); print('ours')"
    assert start(world, code.format("core/scheduler.py")).stdout == "ours\n"
    assert "AssertionError: engine.py is not in the receipt" in start(world, code.format("engine.py")).stderr
