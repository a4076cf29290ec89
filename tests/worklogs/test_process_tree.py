"""What a tree of processes uses: its engine apart, those that have ended, and memory."""
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "worklogs"))
from bench import process_tree  # noqa: E402

BURN = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass\n"
PARENT = (BURN.format(0.2) + "import subprocess, sys\n"
          "subprocess.run([sys.executable, '-c', {ended!r}])\n"
          "engine = subprocess.Popen([sys.executable, '-c', {engine!r}])\n"
          "time.sleep(600)")


@pytest.fixture
def server():
    words = PARENT.format(ended=BURN.format(0.3), engine=BURN.format(0.5) + "time.sleep(600)  # VLLM::EngineCore")
    with subprocess.Popen([sys.executable, "-c", words], start_new_session=True) as process:
        yield process.pid
        os.killpg(process.pid, 9)


def until(reached):
    end = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < end, "it never came to it"
        time.sleep(0.05)


def test_the_engine_is_no_part_of_the_front_end(server):
    until(lambda: process_tree.seconds(server) >= 1.0)
    front = process_tree.front_end_seconds(server)
    # Of its own 0.2, and of a child that has ended 0.3; what an interpreter takes to start comes to it.
    assert 0.5 <= front < process_tree.seconds(server) - 0.45, front
    with pytest.raises(process_tree.NoEngine, match="no engine of its own"):
        process_tree.front_end_seconds(next(process for process in process_tree.tree(server, process_tree.children())
                                            if process != server))


def test_memory_of_a_tree(server):
    until(lambda: len(process_tree.tree(server, process_tree.children())) == 2 and process_tree.seconds(server) > 0.9)
    found = process_tree.memory(server)
    assert found["peak"] == found["peak_rss"] - found["rss"] + found["pss"]
    assert found["processes"] == 2 and 1e6 < found["pss"] <= found["rss"] <= found["peak_rss"] < 1e9, found


def test_a_process_that_is_not_there():
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    assert process_tree.command(process.pid) == "" and process_tree.seconds(process.pid) == 0.0
