"""Prints what our server prints while it starts, then answers as stub_server.py does. For tests of startup_bench.py.

FAKE_FAIL: "plan" ends with a refusal behind the memory plan, "hang" never listens, "error" answers with 500.
FAKE_STUBBORN=1: starts a process that does not end by SIGTERM.
"""
import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from worklogs.stub_server import Stub, answer, serve  # noqa: E402

LINES = [
    "vllm overlay: pin pypi-0.6.3, 50 overlays, manifest 27ea34fd4dfc; back ends: attention torch-paged",
    "INFO 12-02 08:21:16 llm_engine.py:237] Initializing an LLM engine (v0) with config: model='{model}'",
    "INFO 12-02 08:21:19 engine.py:81] Memory plan, float32: 12.82 GiB of memory",
    "INFO 12-02 08:21:21 model_runner_stock.py:1071] Loading model weights took 0.3625 GB",
    "(VllmWorkerProcess pid=3) INFO 12-02 08:21:21 plan.py:99] Recurrent state: 8 slots of 0.11 MiB, 0.9 MiB in all.",
    "INFO 12-02 08:21:22 worker.py:86] Engine up after 37.7 s: process and imports 34.6 s (92 %), device and ranks "
    "0.1 s (0 %), weights and states 1.9 s (5 %), KV cache 0.9 s (2 %)",
    "INFO 12-02 08:21:34 server.py:185] Started in 84.2 s: imports 27.6 s (33 %), first token 11.0 s (13 %)",
]

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--port", type=int)
options, _ = parser.parse_known_args()
fail = os.environ.get("FAKE_FAIL", "")
if os.environ.get("FAKE_STUBBORN"):
    code = ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('stubborn', flush=True); "
            "time.sleep(60)")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
for line in LINES:
    print(line.format(model=options.model), flush=True)
    # The second rank's line is late, so that it shows which one ends a phase, however crowded the machine is.
    time.sleep(0.8 if "Loading model weights" in line else 0.12)
    if fail == "plan" and "Memory plan" in line:
        print("vllm: error: it does not fit: lower --max-num-batched-tokens to 64", file=sys.stderr, flush=True)
        sys.exit(1)
if fail == "hang":
    signal.pause()
recording = [{"status": 500, "chunks": [[0.0, '{"error": {"message": "broken"}}']]}] if fail == "error" else [
    answer(0.1, 0.01, 8, 20, 0)]
asyncio.run(serve(Stub(recording), options.port))
