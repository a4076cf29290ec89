"""Changes many files of the tree or none: what they were is written down first, so that even a kill can be undone.

Order: (1) the journal, a folder in the tree with a copy of every file that will be touched, is prepared under another
name and renamed into place; (2) the files are changed one by one, each atomically; (3) the journal is renamed away,
which is the moment that the change counts, and deleted. Whoever finds a journal in place undoes it. One process at a
time holds the tree's lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from patches.engine import files
from patches.engine.errors import Refused
from patches.engine.files import Content

JOURNAL = ".vllm-overlay-journal"
_PREPARING = JOURNAL + ".new"
_FINISHED = JOURNAL + ".old"
_LIST = "journal.json"


@contextmanager
def locked(tree: Path) -> Iterator[None]:
    """Holds the tree for this process. Raises Refused when another does. The lock dies with its process."""
    descriptor = os.open(tree, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another patch_ops.sh is working on {tree}: wait for it") from None
        yield
    finally:
        os.close(descriptor)


def change(tree: Path, changes: Mapping[str, Content | None], action: str) -> None:
    """Brings every path (below tree) to its content, None for absent, in the order given.

    action: a word for messages. Raises Refused after an error, with everything undone. The caller holds the lock.
    """
    _require_writable(tree, changes)
    try:
        _write_journal(tree, changes, action)
        for path, content in changes.items():
            _put(tree, path, content)
        os.rename(tree / JOURNAL, tree / _FINISHED)
    except BaseException as error:
        undo_interrupted(tree)
        if isinstance(error, OSError):
            raise Refused(
                f"{action} failed ({error}), and everything was undone: remove the cause and try again"
            ) from error
        raise
    files.sync_folder(tree)
    _forget(tree)


def undo_interrupted(tree: Path) -> str | None:
    """Undoes what a killed process left half done; says what that was, or None. The caller holds the lock."""
    journal = tree / JOURNAL
    action = None
    if journal.is_dir():
        action, copies = _read_journal(journal)
        for path in copies:
            files.remove(files.temporary_of(tree / path))
        for path, copy in copies.items():
            _put_back(tree, path, journal / copy if copy else None)
        os.rename(journal, tree / _FINISHED)
    _forget(tree)
    return action


def _write_journal(tree: Path, changes: Mapping[str, Content | None], action: str) -> None:
    preparing = tree / _PREPARING
    _forget(tree)
    os.mkdir(preparing)
    entries = []
    for number, path in enumerate(changes):
        before = files.read(tree / path)
        entries.append({"path": path, "copy": None if before is None else str(number)})
        if before is not None:
            files.write(preparing / str(number), before)
    files.write(preparing / _LIST, Content(json.dumps({"action": action, "files": entries}).encode()))
    os.rename(preparing, tree / JOURNAL)
    files.sync_folder(tree)


def _read_journal(journal: Path) -> tuple[str, dict[str, str | None]]:
    """What was done, and path -> the name of its copy in the journal (None: there was no file)."""
    try:
        record = json.loads((journal / _LIST).read_text(encoding="utf-8"))
        return str(record["action"]), {str(entry["path"]): entry["copy"] for entry in record["files"]}
    except (ValueError, LookupError, TypeError) as error:
        raise Refused(
            f"{journal} is broken ({error}), so what it stands for cannot be undone: install vLLM 0.6.3 anew"
        ) from None


def _put(tree: Path, path: str, content: Content | None) -> None:
    target = tree / path
    if content is not None:
        files.write(target, content)
    else:
        files.remove(target)
    _clean_up(tree, target)


def _put_back(tree: Path, path: str, copy: Path | None) -> None:
    """copy: in the journal, None where there was no file. It is moved, because undoing must work on a full disk."""
    target = tree / path
    if copy is None:
        files.remove(target)
    elif not copy.exists():
        pass  # an undo that was killed has moved it already
    elif files.read(copy) == files.read(target):
        pass  # never touched, perhaps because it cannot be
    else:
        files.move(copy, target)
    _clean_up(tree, target)


def _clean_up(tree: Path, target: Path) -> None:
    files.remove_compiled(target)
    files.remove_empty_folders(target.parent, tree)


def _forget(tree: Path) -> None:
    """Deletes journals that do not count: one that was never put in place, and one whose change is complete."""
    for name in (_PREPARING, _FINISHED):
        if (tree / name).exists():
            shutil.rmtree(tree / name)


def _require_writable(tree: Path, changes: Mapping[str, Content | None]) -> None:
    """So that a tree of another user is refused before anything is tried."""
    for folder in sorted({tree, *((tree / path).parent for path in changes)}):
        existing = folder
        while not existing.exists():
            existing = existing.parent
        caches = [existing / "__pycache__"] if (existing / "__pycache__").is_dir() else []
        for place in (existing, *caches):
            if os.statvfs(place).f_flag & os.ST_RDONLY:
                raise Refused(f"{place} lies on a read-only file system: mount it writable")
            if not os.access(place, os.W_OK | os.X_OK):
                raise Refused(f"no permission to write in {place}: run as its owner, or make it writable")
