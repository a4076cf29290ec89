"""The CPU side of the platform shim: memory, cores and the few places where stock takes a CUDA device for granted."""
import ctypes
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
# malloc.h's number.
_M_ARENA_MAX = -8


def available_cpus() -> int:
    """Returns how many cores this process may use: its affinity, cut by the container's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    return max(1, min(cores, int(quota)) if quota else cores)


def available_memory() -> int:
    """Returns the bytes that can still be taken without swapping: the system's estimate, cut by the container's
    limit."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    free = int(fields["MemAvailable"]) * 1024
    for limit, usage in ((_CGROUP / "memory.max", _CGROUP / "memory.current"),
                         (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes")):
        allowed, used = _read_int(limit), _read_int(usage)
        if allowed is not None and used is not None:
            free = min(free, max(0, allowed - used))
    return free


def resident_memory(peak: bool = False) -> int:
    """Returns the bytes of this process in memory, now or at most so far."""
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return int(found.group(1)) * 1024


def malloc_tunables(tunables: str) -> str:
    """Returns a value of GLIBC_TUNABLES for an engine's process: `tunables`, and what they do not say of

    - hugetlb: weights are read in pages of 2 MiB about a fifth faster than in those of 4 KiB, and large activations do
      not fault page by page;
    - arena_max: see `one_arena`.

    A process follows it from its start on; a C library that does not know it (before glibc 2.35) ignores it.
    """
    given = [part for part in tunables.split(":") if part]
    said = {part.split("=")[0] for part in given}
    wanted = {"glibc.malloc.hugetlb": 1, "glibc.malloc.arena_max": 1}
    return ":".join([*given, *(f"{name}={value}" for name, value in wanted.items() if name not in said)])


def one_arena() -> None:
    """All threads of this process allocate from one heap, from now on.

    glibc gives up to eight for each core: what a thread of the start, or of a long prompt, has freed stays in its own
    and serves nobody else, 50 MB of a server's process. Threads here allocate seldom, or keep what they need.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "glibc.malloc.arena_max" not in os.environ.get("GLIBC_TUNABLES", ""):
        mallopt(_M_ARENA_MAX, 1)


class PeakMemory:
    """Context in which the process' memory is watched; `grown` is then by how many bytes it rose at most above its
    start."""

    def __enter__(self) -> "PeakMemory":
        self._before = self._highest = resident_memory()
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None
        if not _reset_peak():
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._watcher is None:
            self._highest = resident_memory(peak=True)
        else:
            self._over.set()
            self._watcher.join()
        self.grown = max(0, self._highest - self._before)

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self._highest = max(self._highest, resident_memory())


def _reset_peak() -> bool:
    """Starts `resident_memory(peak=True)` anew. Returns whether the system let us: some containers do not."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def kv_cache_space() -> int:
    """Returns VLLM_CPU_KVCACHE_SPACE in GiB, 0 where it is not set. Stock's reader does not name what it rejects."""
    text = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "0")
    if not text.strip().isdecimal():
        raise ValueError(f"VLLM_CPU_KVCACHE_SPACE must be a whole number of GiB, got {text!r:.80}")
    return int(text)


def kv_cache_blocks(block_bytes: int, block_size: int, max_model_len: int, max_num_seqs: int, reserve: int, ranks: int,
                    asked_gib: int) -> int:
    """Returns how many KV blocks one rank allocates.

    Args:
        block_bytes: bytes of one block of `block_size` tokens over all layers of this rank.
        reserve: bytes that the forward pass of one rank needs beside its cache.
        ranks: workers that share the machine's memory.
        asked_gib: VLLM_CPU_KVCACHE_SPACE, per rank; 0 = choose: room for one longest sequence at least, up to 4 GiB,
            but no more than four longest sequences or all that can run at once.

    Raises:
        ValueError: one longest sequence does not fit; the message says what would.
    """
    needed = -(-max_model_len // block_size)
    if asked_gib:
        blocks = asked_gib * GIB // block_bytes
        if blocks < needed:
            raise ValueError(
                f"VLLM_CPU_KVCACHE_SPACE={asked_gib} (GiB) holds {blocks * block_size} tokens, max_model_len is "
                f"{max_model_len}: set it to {-(-needed * block_bytes // GIB)} or lower --max-model-len")
        return blocks
    free = available_memory() // ranks - reserve
    fitting = max(0, free) // block_bytes
    if fitting < needed:
        raise ValueError(f"too little memory: the KV cache of one sequence of max_model_len {max_model_len} takes "
                         f"{needed * block_bytes / GIB:.2f} GiB, {max(0, free) / GIB:.2f} GiB are free for it: lower "
                         f"--max-model-len to {fitting * block_size} or less")
    return min(wanted_kv_blocks(block_bytes, block_size, max_model_len, max_num_seqs), fitting)


def wanted_kv_blocks(block_bytes: int, block_size: int, max_model_len: int, max_num_seqs: int) -> int:
    """Returns how many KV blocks one rank allocates where memory suffices and nobody asked for another number: see
    `kv_cache_blocks`."""
    needed = -(-max_model_len // block_size)
    return max(needed, min(4 * GIB // block_bytes, needed * min(4, max_num_seqs)))


@contextmanager
def without_device_sync() -> Iterator[None]:
    """Stock's `profile_run` ends with `torch.cuda.synchronize()`, which a build without CUDA refuses; here it does
    nothing."""
    before = torch.cuda.synchronize
    torch.cuda.synchronize = lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.synchronize = before


def memory_profiler(stock: type) -> type:
    """Returns stock's `DeviceMemoryProfiler`, able to measure a CPU process (stock returns an unbound name there)."""

    class DeviceMemoryProfiler(stock):  # type: ignore[misc, valid-type]

        def current_memory_usage(self) -> float:
            if torch.cuda.is_available():
                return super().current_memory_usage()
            return float(resident_memory())

    return DeviceMemoryProfiler


def provide_triton_cache_manager() -> None:
    """The multiprocessing executor imports a name that `vllm.triton_utils` has only where Triton is installed."""
    import vllm.triton_utils
    if not hasattr(vllm.triton_utils, "maybe_set_triton_cache_manager"):
        vllm.triton_utils.maybe_set_triton_cache_manager = lambda: None


def _cgroup_quota() -> float | None:
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        allowed, per = _read_int(_CGROUP / "cpu/cpu.cfs_quota_us"), _read_int(_CGROUP / "cpu/cpu.cfs_period_us")
        return allowed / per if allowed and per and allowed > 0 else None
    return None if quota == "max" else float(quota) / float(period)


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.lstrip("-").isdigit() else None
