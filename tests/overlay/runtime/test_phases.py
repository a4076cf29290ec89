"""The stopwatch of a start."""
import subprocess
import sys
import time

from vllm.overlay.runtime import phases
from vllm.overlay.runtime.phases import Phases


def test_phases_add_up_to_the_whole(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(phases.time, "monotonic", lambda: clock[0])
    watch = Phases(100.0)
    for name, took in (("imports", 1.0), ("weights", 6.0), ("imports", 2.0), ("first token", 1.0)):
        clock[0] += took
        watch.end(name)
    assert watch.took == {"imports": 3.0, "weights": 6.0, "first token": 1.0}
    assert watch.line() == "10.0 s: imports 3.0 s (30 %), weights 6.0 s (60 %), first token 1.0 s (10 %)"


def test_a_process_knows_when_it_began():
    before = time.monotonic()
    program = "import runpy, sys, time; time.sleep(0.3); print(runpy.run_path(sys.argv[1])['process_began']())"
    done = subprocess.run([sys.executable, "-c", program, phases.__file__], capture_output=True, text=True, check=True)
    began = float(done.stdout.splitlines()[-1])
    assert before - 0.05 < began < time.monotonic() - 0.3, (before, began)


def test_an_engine_in_this_process_begins_now():
    before = time.monotonic()
    assert before <= phases.engine_phases()._began <= time.monotonic()
