"""Runs a function in a child whose mounts nobody else sees, so that tests may mount what they like."""

from __future__ import annotations

import ctypes
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_NO_MOUNTS = 78


def in_private_mounts(function: Callable[[], Any]) -> Any:
    """What function returns (as JSON carries it). Skips the test where the kernel does not let us."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if _leave() else _NO_MOUNTS
            if status == 0:
                os.write(writer, json.dumps(function()).encode())  # short: a pipe takes 64 KiB
        except BaseException:
            status = 1
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == _NO_MOUNTS:
        pytest.skip("this machine lets nobody here make mounts of his own (unshare)")
    assert status == 0, f"the child failed with {status}; its traceback is in the captured output"
    return json.loads(answer)


def _leave() -> bool:
    user, group = os.geteuid(), os.getegid()
    if _call("unshare", _NEW_MOUNTS if user == 0 else _NEW_MOUNTS | _NEW_USER):
        return False
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None) == 0


def mount_tmpfs(folder: Path, options: str) -> None:
    """An empty file system in memory. options: as ``mount -o`` takes them."""
    _must("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options.encode())


def unmount(folder: Path) -> None:
    _must("umount", os.fsencode(folder))


def mount_read_only(folder: Path) -> None:
    """The same folder once more over itself, and nobody, root included, can write there."""
    _must("mount", os.fsencode(folder), os.fsencode(folder), None, _BIND, None)
    _must("mount", None, os.fsencode(folder), None, _BIND | _REMOUNT | _READ_ONLY, None)


def _call(name: str, *arguments: Any) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    return getattr(library, name)(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments))


def _must(name: str, *arguments: Any) -> None:
    if _call(name, *arguments):
        raise OSError(ctypes.get_errno(), f"{name} {arguments}")
