"""Reading and writing single files of the tree: whole or not at all, and on the disk before the next step."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

# Whatever the builder's umask: another user may run the server.
_NEW_FILE = 0o644
_NEW_FOLDER = 0o755
_TEMPORARY = ".{}.vllm-overlay-tmp"


@dataclass(frozen=True)
class Content:
    """A file's bytes and what else a restore must bring back. mtime_ns None: the time of writing."""

    data: bytes
    mode: int = _NEW_FILE
    mtime_ns: int | None = None


def read(path: Path) -> Content | None:
    """The file at path, None when there is none. Raises OSError for a folder or a link: no restore would be true."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is no plain file")
    return Content(path.read_bytes(), stat.S_IMODE(status.st_mode), status.st_mtime_ns)


def write(path: Path, content: Content) -> None:
    """Puts content at path in one step; folders are made as needed."""
    _make_folder(path.parent)
    temporary = temporary_of(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, content.mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, content.mode)
        file.write(content.data)
        file.flush()
        os.fsync(descriptor)
    if content.mtime_ns is not None:
        os.utime(temporary, ns=(content.mtime_ns, content.mtime_ns))
    os.replace(temporary, path)
    sync_folder(path.parent)


def move(source: Path, path: Path) -> None:
    """Puts the file source at path in one step, mode and time included; takes no room on the disk."""
    _make_folder(path.parent)
    os.replace(source, path)
    sync_folder(path.parent)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir()
        folder.chmod(_NEW_FOLDER)


def remove(path: Path) -> None:
    """Takes the file away if it is there."""
    path.unlink(missing_ok=True)


def temporary_of(path: Path) -> Path:
    """The name under which write prepares path; the same each time, so that a rollback finds what a kill left."""
    return path.with_name(_TEMPORARY.format(path.name))


def sync_folder(folder: Path) -> None:
    """Makes the folder's names survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_compiled(source: Path) -> None:
    """Deletes what Python compiled from source: it trusts a .pyc when size and time match, or without a look."""
    if source.suffix != ".py":
        return
    for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
        remove(compiled)


def remove_empty_folders(folder: Path, top: Path) -> None:
    """Removes folder and its parents below top while they are empty or gone; an empty ``__pycache__`` is nothing."""
    while folder != top:
        if folder.is_dir():
            cache = folder / "__pycache__"
            if cache.is_dir() and not any(cache.iterdir()):
                cache.rmdir()
            if any(folder.iterdir()):
                return
            folder.rmdir()
        folder = folder.parent
