"""patch_ops.sh as the image build calls it, on a copy of this repository's engine with the small overlay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.overlay_world import REPOSITORY, World, differences, snapshot


@pytest.fixture
def copy(world: World) -> Path:
    """A repository of its own: our engine, the world's rows and files, in a folder with a blank in its name."""
    root = world.repository.parent / "a clone"
    shutil.copytree(
        REPOSITORY / "patches", root / "patches", ignore=shutil.ignore_patterns("__pycache__", "edits", "pins.json")
    )
    shutil.copytree(world.layout.edits, root / "patches/edits")
    shutil.copytree(world.layout.overrides, root / "vllm_overrides")
    shutil.copy(REPOSITORY / "patch_ops.sh", root)
    shutil.copy(world.pins_file, root / "patches/pins.json")
    with (root / "patches/manifest.py").open("a") as manifest:
        manifest.write(f"\nOVERLAYS = {world.layout.overlays!r}\n")
    return root


def call(copy: Path, world: World, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(world.tree.parent), **environment}
    script = copy / "patch_ops.sh" if cwd != copy else "./patch_ops.sh"
    return subprocess.run(["bash", str(script), *arguments], cwd=cwd, env=settings, capture_output=True, text=True)


def test_without_arguments_as_the_build_does(copy: Path, world: World) -> None:
    before = snapshot(world.tree)
    tree = f"--root={world.tree}"
    done = call(copy, world, tree, cwd=copy)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["applied", "verified"]
    assert "applied: 0 changes" in call(copy, world, tree, "apply", cwd=world.tree).stdout
    assert call(copy, world, tree, "revert", cwd=Path("/")).returncode == 0
    assert differences(before, snapshot(world.tree)) == []
    assert list(copy.rglob("__pycache__")) == [], "the repository may be read-only"


def test_vllm_in_the_callers_folder_is_not_meant(copy: Path, world: World) -> None:
    """Only the search path counts. -S leaves out the site packages, so that the small tree is the only one."""
    python = world.repository / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    decoy = world.repository / "decoy"
    shutil.copytree(world.tree, decoy / "vllm")
    done = call(copy, world, "status", cwd=decoy, PYTHON=str(python))
    assert done.returncode == 0, done
    assert done.stdout.startswith(f"{world.tree} (pin "), done.stdout
    done = call(copy, world, cwd=decoy, PYTHON=str(python), PYTHONPATH=f"{world.tree.parent}:{decoy}")
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"refused: two different vllm trees on the search path, {world.tree} and {decoy}/vllm"
    ), done.stderr


def test_refusal_is_a_line_and_a_status(copy: Path, world: World) -> None:
    (world.tree / "sampler.py").unlink()
    done = call(copy, world, f"--root={world.tree}", cwd=copy)
    assert done.returncode == 2
    assert done.stderr.startswith("refused: sampler.py: MISSING: ") and done.stderr.count("\n") == 1, done.stderr
    done = call(copy, world, "unknown", cwd=copy)
    assert done.returncode == 2
    assert done.stderr.startswith("refused: ") and done.stderr.count("\n") == 1, done.stderr


def test_changed_receipt_is_not_verified(copy: Path, world: World) -> None:
    """The two proofs find what the other cannot know."""
    tree = f"--root={world.tree}"
    call(copy, world, tree, cwd=copy)
    receipt = world.tree / "overlay/receipt.json"
    receipt.write_text(receipt.read_text().replace('"count": 5', '"count": 6'))
    (world.tree / "engine.py").write_text("# vllm-overlay: package\nx = 1\n")
    lines = call(copy, world, tree, "verify", cwd=copy).stderr.splitlines()
    assert lines == [
        "not verified: overlay/receipt.json is not as the sources say",
        "not verified: unexpected marker of row package in engine.py",
    ]
