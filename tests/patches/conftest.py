"""A world of its own for each test, see tests/helpers/overlay_world.py; and the real trees that the pins are of."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.helpers.overlay_world import World, make_world

PYPI, COREX = "pypi-0.6.3", "corex-3.2.3"


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process wrote survives it without fsync, which costs more here than all else."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> World:
    """Synthetic stock, nothing applied."""
    return make_world(tmp_path, capsys)


@pytest.fixture(scope="module", params=[PYPI, COREX])
def pin(request: pytest.FixtureRequest) -> str:
    """Each pin in turn; the vendor's files are nobody's to publish, so its tests need VENDOR_TREE."""
    if request.param == COREX and "VENDOR_TREE" not in os.environ:
        pytest.skip("VENDOR_TREE is not set: the folder of the vendor image's vllm package")
    return request.param


@pytest.fixture(scope="module")
def pin_tree(pin: str) -> Path:
    """Its tree, which tests only read; the overlay may lie on it."""
    if pin == COREX:
        tree = Path(os.environ["VENDOR_TREE"]).resolve()
        assert (tree / "__init__.py").is_file(), f"VENDOR_TREE={tree} is no vllm package"
        return tree
    spec = importlib.util.find_spec("vllm")
    assert spec and spec.origin, f"{sys.executable} has no vllm"
    return Path(spec.origin).resolve().parent
