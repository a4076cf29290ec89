"""How much of a checkpoint lies in the page cache, and putting it out of it, where the system lets us."""
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

COLD, WARM = 0.1, 0.9
WEIGHTS = (".safetensors", ".bin", ".pt")


def weights(folder: Path) -> list[Path]:
    """The files of a checkpoint that hold its weights."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS)
    except OSError:
        return []


def resident(files: Iterable[Path]) -> float | None:
    """Share of the files' bytes that are in memory; None where the system does not tell.

    Linux tells only who owns a file or may write to it, and says "all" to others.
    """
    whole = there = 0
    for path in files:
        try:
            found = _pages(path)
        except (OSError, AttributeError):
            return None
        if found is None:
            return None
        whole, there = whole + found[0], there + found[1]
    return there / whole if whole else None


def state(share: float | None) -> str:
    """A name for it."""
    if share is None:
        return "not measured"
    return "cold" if share <= COLD else "warm" if share >= WARM else "mixed"


def drop(files: Iterable[Path]) -> None:
    """Asks the system to forget the files' pages; `resident` tells whether it did."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _pages(path: Path) -> tuple[int, int] | None:
    """(pages, pages in memory)."""
    about = path.stat()
    if not about.st_size:
        return 0, 0
    if os.geteuid() not in (0, about.st_uid) and not os.access(path, os.W_OK):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    count = -(-about.st_size // mmap.PAGESIZE)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(None, about.st_size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        flags = (ctypes.c_ubyte * count)()
        try:
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(about.st_size), flags):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(about.st_size))
    finally:
        os.close(descriptor)
    return count, count - bytes(flags).count(0)
