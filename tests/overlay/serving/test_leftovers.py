"""What a killed engine leaves: processes that hold memory, files, and what it was just counting."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm.overlay.serving import engine_process, leftovers

PYTHON = sys.executable


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def stands_apart(connection) -> None:
    """An engine's process with a child, shared memory and a semaphore that it never gives back."""
    engine_process.stand_apart()
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=1000)
    lock = multiprocessing.get_context("spawn").Lock()
    child = subprocess.Popen([PYTHON, "-c", "import time; time.sleep(600)"])
    connection.send((child.pid, memory.name, lock._semlock.name))
    time.sleep(600)


@pytest.fixture
def apart():
    """(its process, pid of its child, paths of its shared memory)"""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=stands_apart, args=(theirs, ))
    process.start()
    assert ours.poll(60), "it did not start"
    child, memory, lock = ours.recv()
    yield process, child, [Path("/dev/shm", memory), Path("/dev/shm/sem." + lock.strip("/"))]
    process.kill()
    leftovers.end_group(process.pid)


def test_nothing_of_a_killed_engine_is_left(apart):
    process, child, shared = apart
    assert alive(child) and all(path.exists() for path in shared), shared
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert alive(child), "killed by somebody else"
    began = time.monotonic()
    leftovers.end_group(process.pid)
    assert time.monotonic() - began < leftovers._TRACKER_S, "the tracker was not left the time to end by itself"
    assert not alive(child)
    assert not any(path.exists() for path in shared), "shared memory or a semaphore"
    assert not leftovers._members(process.pid)


def test_what_is_sent_to_all_processes_of_a_service_is_not_for_the_engine(apart):
    """SIGTERM by a supervisor, Ctrl-C and the end of a terminal: the server decides. What it sends itself arrives."""
    process, child, _ = apart
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(process.pid, number)
    time.sleep(0.2)
    assert process.is_alive()
    assert os.getpgid(process.pid) == process.pid == os.getpgid(child) != os.getpgid(0)
    os.kill(process.pid, engine_process.END)
    process.join(60)
    assert process.exitcode == 1, "a KeyboardInterrupt that nobody caught"


def test_processes_of_others_are_not_touched():
    other = subprocess.Popen([PYTHON, "-c", "import time; time.sleep(600)"], process_group=0)
    try:
        leftovers.end_group(os.getpid() + 10**7)
        assert alive(other.pid)
    finally:
        other.kill()
        other.wait()


def test_sockets(tmp_path):
    for name in ("a_input_socket", "a_data_socket", "b_input_socket"):
        (tmp_path / name).touch()
    leftovers.remove_sockets(f"ipc://{tmp_path}/a")
    assert [path.name for path in tmp_path.iterdir()] == ["b_input_socket"]


COUNTS = """
import os, sys
from prometheus_client import Counter, Gauge, Histogram
Counter("tokens", "", ["model"]).labels("m").inc(int(sys.argv[1]))
Gauge("running", "", multiprocess_mode="sum").set(3)
Gauge("newest", "", multiprocess_mode="mostrecent").set(3)
Histogram("seconds", "", buckets=[1, 2]).observe(1.5)
print(os.getpid(), flush=True)
os.kill(os.getpid(), 9)
"""


def shown(folder: Path) -> dict[str, float]:
    script = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
    done = subprocess.run([PYTHON, "-c", script], env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
                          capture_output=True, text=True, check=True)
    return {name: float(value) for name, _, value in
            (line.rpartition(" ") for line in done.stdout.splitlines() if line and line[0] != "#")}


def test_metrics(tmp_path):
    """Totals go on, of all engines together, in one file of a kind; what was running is not running any more."""
    for tokens in (5, 7, 9):
        done = subprocess.run([PYTHON, "-c", COUNTS, str(tokens)], capture_output=True, text=True,
                              env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)})
        assert shown(tmp_path)["running"] == 3, done.stderr
        leftovers.settle_metrics(str(tmp_path), int(done.stdout))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counter_0.db", "histogram_0.db"]
    found = shown(tmp_path)
    assert found['tokens_total{model="m"}'] == 21 and found["seconds_count"] == 3 and found["seconds_sum"] == 4.5
    assert found['seconds_bucket{le="2.0"}'] == 3 and found['seconds_bucket{le="1.0"}'] == 0
    assert "running" not in found and "newest" not in found


def test_metrics_that_were_cut_off(tmp_path):
    (tmp_path / "counter_77.db").write_bytes(b"\xff\x0f\x00\x00\x00\x00\x00\x00\x00\xff\x00\x00" + bytes(5000))
    (tmp_path / "counter_177.db").touch()
    leftovers.settle_metrics(str(tmp_path), 77)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counter_0.db", "counter_177.db"]
    leftovers.settle_metrics(None, 77)
