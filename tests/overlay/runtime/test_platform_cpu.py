"""Memory and cores of a CPU: what is free, and how much of it becomes KV cache."""
import os
import subprocess
import sys

import pytest
import torch

from vllm.overlay.runtime import platform_cpu
from vllm.overlay.runtime.platform_cpu import GIB, kv_cache_blocks, kv_cache_space


@pytest.fixture
def free(monkeypatch):
    """Sets how much memory seems free, in bytes."""
    return lambda size: monkeypatch.setattr(platform_cpu, "available_memory", lambda: size)


def blocks(block_bytes=16 * 1024, max_model_len=262_144, max_num_seqs=8, reserve=GIB // 2, ranks=1, asked_gib=0):
    return kv_cache_blocks(block_bytes, 16, max_model_len, max_num_seqs, reserve, ranks, asked_gib)


def test_the_longest_sequence_fits_by_default(free):
    """262,144 tokens at 16 KiB a block are 256 MiB; 4 of them are the default where memory allows."""
    free(20 * GIB)
    assert blocks() == 4 * 16_384
    assert blocks(max_num_seqs=2) == 2 * 16_384
    # Stock takes 4 GiB, which would not hold one sequence here.
    assert blocks(block_bytes=512 * 1024) == 16_384


def test_what_is_free_bounds_it(free):
    free(GIB)
    assert blocks() == (GIB // 2) // (16 * 1024)
    assert blocks(ranks=2, reserve=GIB // 4) == (GIB // 4) // (16 * 1024), "each rank takes a step's memory"
    free(GIB - 1024**2 * 257)
    with pytest.raises(ValueError,
                       match=r"^too little memory: .* max_model_len 262144 takes 0.25 GiB, 0.25 GiB are free for it: "
                       r"lower --max-model-len to 261120 or less$"):
        blocks()
    free(0)
    with pytest.raises(ValueError, match="lower --max-model-len to 0 or less"):
        blocks()


def test_what_was_asked_for(free):
    free(0)
    assert blocks(asked_gib=3) == 3 * GIB // (16 * 1024)
    with pytest.raises(
            ValueError,
            match=r"VLLM_CPU_KVCACHE_SPACE=1 \(GiB\) holds 32768 tokens, max_model_len is 262144: set it to 8 or"):
        blocks(block_bytes=512 * 1024, asked_gib=1)


def test_a_size_that_is_none_is_named(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert kv_cache_space() == 0
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert kv_cache_space() == 4
    for wrong in ("0.5", "-1", "4GiB", ""):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", wrong)
        with pytest.raises(ValueError, match="^VLLM_CPU_KVCACHE_SPACE must be a whole number of GiB, got '"):
            kv_cache_space()


def test_measures():
    assert 0 < platform_cpu.available_memory() < 1 << 50
    assert 1 <= platform_cpu.available_cpus() <= len(os.sched_getaffinity(0))
    before = platform_cpu.resident_memory()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert platform_cpu.resident_memory() - before > 0.9 * block.numel()


@pytest.mark.parametrize("allowed", [True, False], ids=["by the system", "by watching"])
def test_peak_memory(monkeypatch, allowed):
    """Some containers do not let a process reset its peak; then it is watched."""
    if not allowed:
        monkeypatch.setattr(platform_cpu, "_reset_peak", lambda: False)
    with platform_cpu.PeakMemory() as memory:
        block = torch.ones(64 << 20, dtype=torch.uint8)
        block.add_(1)
        del block
    assert 0.9 * (64 << 20) < memory.grown < 2 * (64 << 20)
    with platform_cpu.PeakMemory() as memory:
        pass
    assert memory.grown < 16 << 20, "an earlier peak does not count"


def test_container_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(platform_cpu, "_CGROUP", tmp_path)
    machine = platform_cpu.available_memory()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert abs(platform_cpu.available_memory() - machine) < GIB
    (tmp_path / "memory.max").write_text("1000005\n")
    assert platform_cpu.available_memory() == 1_000_000
    assert platform_cpu.available_cpus() == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert platform_cpu.available_cpus() == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert platform_cpu.available_cpus() == 1


def test_no_device_to_wait_for():
    before = torch.cuda.synchronize
    with platform_cpu.without_device_sync():
        torch.cuda.synchronize()
    assert torch.cuda.synchronize is before


def test_threads_are_shared_among_ranks(monkeypatch):
    from vllm.executor import cpu_executor
    set_to = []
    monkeypatch.setattr(platform_cpu, "available_cpus", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    cpu_executor._share_cores(2)
    assert set_to == [] and os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    for ranks, threads in ((1, 8), (2, 4), (3, 2), (20, 1)):
        cpu_executor._share_cores(ranks)
        assert set_to.pop() == threads and os.environ["OMP_NUM_THREADS"] == str(threads)
        monkeypatch.delenv("OMP_NUM_THREADS")


@pytest.mark.parametrize("given, expected", [
    ("", "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"),
    ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
    ("glibc.malloc.hugetlb=0:glibc.malloc.arena_max=2", "glibc.malloc.hugetlb=0:glibc.malloc.arena_max=2"),
])
def test_malloc_is_told_what_nobody_has_decided(given, expected):
    assert platform_cpu.malloc_tunables(given) == expected


@pytest.mark.parametrize("tunables", ["", "glibc.malloc.arena_max=8"])
def test_threads_share_one_heap(tunables):
    """Unless somebody has decided otherwise: malloc_info has an element for each heap."""
    program = """
import ctypes, os, sys, tempfile, threading
from vllm.overlay.runtime.platform_cpu import one_arena
one_arena()
def work():
    ctypes.CDLL(None).malloc(3000)
    gate.wait()
gate = threading.Barrier(5)
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
gate.wait()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as file:
    stream = libc.fopen(file.name.encode(), b"w")
    libc.malloc_info(0, ctypes.c_void_p(stream))
    libc.fflush(ctypes.c_void_p(stream))
    print("heaps:", file.read().count(b"<heap nr="))
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, "GLIBC_TUNABLES": tunables, "OMP_NUM_THREADS": "1"})
    heaps = int(done.stdout.rpartition("heaps:")[2])
    print(heaps)
    assert heaps == 1 if not tunables else heaps > 1
