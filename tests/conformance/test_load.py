"""64 clients with 40 requests each (200 in the long test), one in ten leaves, one in twenty sends nonsense: nobody gets
a 5xx, and afterwards nothing is left of them."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import httpx
import pytest

from tests.conformance.inside import PATH
from tests.conformance.load import Load
from tests.helpers.server_process import ServerProcess

CLIENTS = 64
# What a busy process keeps for good (arenas, caches that have a bound) is there after the first part of the load.
WARM_UP = 8
MEMORY_MIB = 48


class Held:
    """What the server's two processes hold: memory in MiB, open files, threads; asyncio tasks of the front end."""

    def __init__(self, server: ServerProcess) -> None:
        processes = [server.process.pid, int(re.findall(r"engine process (\d+)", server.output())[-1])]
        status = [Path(f"/proc/{pid}/status").read_text() for pid in processes]
        self.memory = [int(re.search(r"VmRSS:\s+(\d+)", text).group(1)) / 1024 for text in status]
        self.threads = [int(re.search(r"Threads:\s+(\d+)", text).group(1)) for text in status]
        self.files = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in processes]
        self.tasks = httpx.get(server.base + PATH).json()["tasks"]

    def __repr__(self) -> str:
        return (f"memory {[round(one) for one in self.memory]} MiB, threads {self.threads}, files {self.files}, "
                f"tasks {self.tasks}")


def gauge(server: ServerProcess, name: str) -> float:
    return max(float(value) for value in re.findall(rf"^vllm:{name}\S* (\S+)$", server.get("/metrics").text,
                                                    re.MULTILINE))


def wait_until_idle(server: ServerProcess) -> None:
    """The engine has nobody left, in a few steps' time."""
    deadline = time.monotonic() + 60
    while True:
        left = {name: gauge(server, name) for name in ("num_requests_running", "num_requests_waiting",
                                                       "gpu_cache_usage_perc")}
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, f"60 s after the last client: {left}"
        # Gauges are written at the end of a step.
        assert server.post(max_tokens=1).status_code == 200
        time.sleep(0.5)


def loaded(server: ServerProcess, requests: int, seed: int) -> Load:
    load = Load(server.base, seed=seed)
    asyncio.run(load.run(CLIENTS, requests))
    assert not load.wrong, f"{len(load.wrong)} wrong, {load.outcomes}:\n" + "\n".join(load.wrong[:10])
    assert load.sent == CLIENTS * requests, load.outcomes
    assert load.outcomes["left before the answer"] + load.outcomes["left 200"] > CLIENTS * requests * 0.05
    wait_until_idle(server)
    return load


def check(server: ServerProcess, requests: int) -> None:
    loaded(server, WARM_UP, seed=1)
    before = Held(server)
    loaded(server, requests - WARM_UP, seed=2)
    after = Held(server)
    print(f"before: {before}\nafter: {after}")
    for grown, was in zip(after.memory, before.memory, strict=True):
        assert grown - was < MEMORY_MIB, f"before: {before}\nafter: {after}"
    for now, was in zip(after.threads + after.files, before.threads + before.files, strict=True):
        assert now <= was + 4, f"before: {before}\nafter: {after}"
    assert after.tasks <= before.tasks + 2, f"before: {before}\nafter: {after}"
    # Every place and slot is free again: as many as there are places at once, and more that wait for one.
    load = Load(server.base, seed=3)
    asyncio.run(load.run(CLIENTS, 1))
    assert not load.wrong and httpx.get(f"{server.base}/health").status_code == 200, load.wrong


@pytest.mark.timeout(600)
def test_load(own_server):
    check(own_server, 40)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_long_load(own_server):
    check(own_server, 200)
