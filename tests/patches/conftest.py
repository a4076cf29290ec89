"""A world of its own for each test; see tests/helpers/overlay_world.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.overlay_world import World, make_world


@pytest.fixture
def world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> World:
    """Synthetic stock, nothing applied."""
    return make_world(tmp_path, capsys)
