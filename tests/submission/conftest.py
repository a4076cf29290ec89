"""The trees that an imitated image can hold, and the repository as the platform clones it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patches.engine import cli
from patches.manifest import OVERLAYS
from tests.helpers.overlay_world import REPOSITORY
from tests.submission.dockerfile import delivered
from tests.submission.imitated_image import Image, Unavailable, make_image

_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so")
_MEMORY = Path("/dev/shm")
_NEEDED = 128 << 20  # bytes, for two trees and two clones


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """In memory where there is room: the engine syncs every file that it writes, which takes long on a busy disk."""
    roomy = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _NEEDED
    return tempfile.TemporaryDirectory(prefix="imitated-image-", dir=_MEMORY if roomy else None)


@pytest.fixture(scope="session")
def shared() -> Iterator[Path]:
    """A folder for what no test changes."""
    with _scratch() as folder:
        yield Path(folder)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for one test."""
    with _scratch() as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def stock(shared: Path) -> Path:
    """Stock 0.6.3 without its compiled libraries, a third of its files with CRLF, as in the vendor's image."""
    spec = importlib.util.find_spec("vllm")
    assert spec and spec.origin, f"{sys.executable} has no vllm"
    tree = shared / "stock/vllm"
    shutil.copytree(Path(spec.origin).resolve().parent, tree, ignore=_LEFT_OUT)
    assert cli.main(["--root", str(tree), "revert"]) == 0
    edited = {tree / overlay.target for overlay in OVERLAYS if overlay.kind == "edit"}
    for file in {*sorted(tree.rglob("*.py"))[::3], *edited}:
        with_crlf(file)
    return tree


@pytest.fixture(scope="session")
def vendor() -> Path:
    """The vendor's own tree, which is in no repository."""
    place = os.environ.get("VENDOR_TREE")
    if not place:
        pytest.skip("VENDOR_TREE does not name a copy of the vendor's vllm folder")
    return Path(place)


@pytest.fixture(scope="session")
def clone(shared: Path) -> Path:
    """What COPY delivers of this repository; the tests change copies of it."""
    folder = shared / "clone"
    for name in delivered(REPOSITORY):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, folder / name)
    return folder


@pytest.fixture
def new_image(scratch: Path) -> Callable[[Path], Image]:
    """Makes an image around a tree; the test is skipped by name where none can be made."""

    def make(tree: Path) -> Image:
        try:
            return make_image(scratch / "image", tree)
        except Unavailable as why:
            pytest.skip(str(why))

    return make


def with_crlf(file: Path) -> None:
    """Turns the line endings of a text file."""
    file.write_bytes(file.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
