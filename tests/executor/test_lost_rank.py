"""A rank that is lost ends the engine, with the reason, and nothing is left behind; neither hangs.

A suite of its own: engines are forked from here, so this process must never have held one.
"""
import asyncio
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.helpers.server_process import ServerProcess, free_port
from tests.helpers.tiny_models import greedy, make_qwen2
from tests.helpers.tokenizer import tokenizer_folder
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.executor.multiproc_worker_utils import ResultHandler
from vllm.overlay.engine import ranks
from vllm.overlay.serving import engine_client
from vllm.overlay.serving.errors import StartError
from vllm.worker.cpu_worker import CPUWorker

KILLED = r"rank 1 \(process \d+\) was killed by signal 9 \(signal 9 often means that the machine ran out of memory\)"


def alive(pid):
    """Whether a process runs, or could."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue    # It has ended.
        if parent == pid and b"resource_tracker" not in command:
            found.append(int(folder.name))
    return found


def until(what, seconds, why):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, f"after {seconds} s: {why}"
        time.sleep(0.02)
    return found


class Obedient:
    """A worker without a model."""

    def __init__(self, rank):
        self.rank = rank

    def answer(self):
        return self.rank

    def start_worker_execution_loop(self):
        raise KeyError("a block table")

    def sleep(self):
        time.sleep(600)


@pytest.fixture
def world(monkeypatch):
    """Makes (ranks 1 and 2, their monitor, what was reported)."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    told, monitors = [], []
    monkeypatch.setattr(ranks, "_on_loss", told.append)

    def make():
        results = ResultHandler()
        workers = [ranks.RankProcess(results, partial(Obedient, rank=rank)) for rank in (1, 2)]
        monitor = ranks.RankMonitor(workers, results)
        results.start()
        monitor.start()
        monitors.append(monitor)
        return workers, monitor, told

    yield make
    for monitor in monitors:
        monitor.close()


class TestMonitor:
    def test_a_rank_that_is_killed(self, world):
        (first, second), monitor, told = world()
        assert [worker.execute_method("answer").get() for worker in (first, second)] == [1, 2]
        assert monitor.loss(0) is None
        waiting = second.execute_method("sleep")
        os.kill(first.process.pid, signal.SIGKILL)
        until(lambda: told, 5, "nothing was reported")
        assert len(told) == 1 and re.fullmatch(KILLED, told[0]), told
        assert monitor.loss() == told[0]
        assert not alive(first.process.pid) and not alive(second.process.pid), "the others are ended first"
        with pytest.raises(ChildProcessError):
            waiting.get()

    def test_a_rank_that_ends(self, world):
        (_, second), monitor, told = world()
        os.kill(second.process.pid, signal.SIGABRT)
        until(lambda: told, 5, "nothing was reported")
        assert told == [f"rank 2 (process {second.process.pid}) was killed by signal 6"]
        assert ranks.how_it_ended(3) == "ended with exit code 3"

    def test_a_rank_that_raises(self, world, monkeypatch):
        """It lives, and stock tells nobody. The first rank has a moment to raise the same by itself."""
        monkeypatch.setattr(ranks, "_GRACE_S", 0.5)
        (first, _), monitor, told = world()
        future = first.execute_method("start_worker_execution_loop")
        with pytest.raises(KeyError):
            future.get()
        assert not told and first.process.is_alive()
        until(lambda: told, 5, "nothing was reported")
        assert told == [f"rank 1 (process {first.process.pid}) failed in a step: KeyError: 'a block table'"]

    async def test_a_rank_that_raises_in_the_asynchronous_engine(self, world, monkeypatch):
        monkeypatch.setattr(ranks, "_GRACE_S", 0.1)
        (first, _), monitor, told = world()
        with pytest.raises(KeyError):
            await first.execute_method_async("start_worker_execution_loop")
        until(lambda: told, 5, "nothing was reported")
        assert "failed in a step: KeyError: 'a block table'" in told[0]

    def test_a_wanted_end(self, world):
        workers, monitor, told = world()
        workers[0].execute_method("sleep")
        expected = ", ".join(f"rank {worker.rank} (process {worker.process.pid}) is waiting" for worker in workers)
        until(lambda: monitor.states() == expected, 5, "they do not wait")
        os.kill(workers[1].process.pid, signal.SIGSTOP)
        until(lambda: "is stopped" in monitor.states(), 5, monitor.states())
        monitor.close()
        assert not any(alive(worker.process.pid) for worker in workers), "stopped or busy"
        monitor.join(5)
        assert told == [] and monitor.loss(0) is None

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_what_the_server_is_told_is_not_for_them(self, world, number):
        """Ctrl-C in the terminal, and what a supervisor sends to all processes of a service."""
        workers, monitor, told = world()
        assert workers[0].execute_method("answer").get() == 1
        os.kill(workers[0].process.pid, number)
        assert workers[0].execute_method("answer").get() == 1 and not told


def test_a_rank_that_is_killed_while_it_writes(monkeypatch):
    """It keeps the lock of the queue. Whoever waits is told all the same, and the engine's process can end."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr(ranks, "_READ_S", 0.2)

    def engine():
        results = ResultHandler()
        worker = ranks.RankProcess(results, partial(Obedient, rank=1))
        monitor = ranks.RankMonitor([worker], results)
        results.start()
        assert worker.execute_method("answer").get() == 1
        waiting = worker.execute_method("sleep")
        results.result_queue._wlock.acquire()
        monitor.close()
        with pytest.raises(ChildProcessError):
            waiting.get()
        assert results.is_alive(), "it reads on"

    process = multiprocessing.get_context("fork").Process(target=engine)
    process.start()
    process.join(20)
    hangs = process.is_alive()
    process.kill()
    assert not hangs, "the process waits at its end"
    assert process.exitcode == 0


@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_rank_ends_with_its_engine(thread, tmp_path, monkeypatch):
    """Killed, the engine cannot end anybody. Started by the main thread even a stopped rank ends."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")

    def engine():
        def start():
            results = ResultHandler()
            worker = ranks.RankProcess(results, partial(Obedient, rank=1))
            results.start()
            worker.execute_method("answer").get()
            (tmp_path / "pid.new").write_text(str(worker.process.pid))
            (tmp_path / "pid.new").rename(tmp_path / "pid")
            time.sleep(600)
        if thread == "main":
            start()
        threading.Thread(target=start).start()

    process = multiprocessing.get_context("fork").Process(target=engine)
    process.start()
    until((tmp_path / "pid").exists, 20, "no rank was started")
    rank = int((tmp_path / "pid").read_text())
    if thread == "main":
        os.kill(rank, signal.SIGSTOP)
    process.kill()
    process.join()
    until(lambda: not alive(rank), 5, "it is still there")


def in_rank(rank, monkeypatch, method, do, at=0):
    """Has a rank of engines, which are forked from here, `do` something in the call number `at` of a worker's
    method."""
    stock, calls = getattr(CPUWorker, method), []

    def instead(self, *args, **kwargs):
        calls.append(1)
        if self.rank == rank and len(calls) == at + 1:
            do()
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(CPUWorker, method, instead)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr(engine_client, "get_context", lambda _: multiprocessing.get_context("fork"))


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise KeyError("no luck")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_qwen2(tmp_path_factory.mktemp("model"))
    for file in tokenizer_folder(small=479).iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def config(model):
    arguments = AsyncEngineArgs(model=str(model), dtype="float32", max_model_len=256, max_num_batched_tokens=64,
                                max_num_seqs=8, tensor_parallel_size=2, disable_log_stats=True,
                                num_gpu_blocks_override=64)
    return arguments, arguments.create_engine_config()


@pytest.mark.parametrize(("method", "do", "reason"), [
    ("load_model", die, KILLED),
    # The first rank waits for it, and would for half an hour.
    ("init_device", fail, r"rank 1 \(process \d+\) failed in init_device: KeyError: 'no luck'"),
], ids=["killed while it loads", "failed before it joined"])
async def test_at_the_start(config, monkeypatch, method, do, reason):
    in_rank(1, monkeypatch, method, do)
    with pytest.raises(StartError) as caught:
        async with engine_client.in_own_process(*config):
            pytest.fail("it is not up")
    assert re.fullmatch(reason, str(caught.value)), caught.value
    assert not multiprocessing.active_children() and not alive(re.search(r"\d{2,}", str(caught.value)).group())


@pytest.mark.parametrize(("rank", "do", "reason"), [
    (1, die, KILLED),
    (0, fail, r"KeyError: 'no luck'"),
    (1, fail, r"rank 1 \(process \d+\) failed in a step: KeyError: 'no luck'"),
    (1, stop, r"a step has not ended after the 6 s of VLLM_ENGINE_ITERATION_TIMEOUT_S: "
              r"rank 1 \(process \d+\) is stopped"),
], ids=["killed", "the first failed", "failed", "stopped"])
async def test_in_a_step(config, monkeypatch, rank, do, reason):
    """After the ranks have heard what to do. Both requests that run are told, and nothing is left."""
    in_rank(rank, monkeypatch, "execute_worker", do, at=6)
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "6")
    async with engine_client.in_own_process(*config) as engine:
        (process, ) = multiprocessing.active_children()
        (other, ) = children(process.pid)

        async def ask(name):
            async for _ in engine.client.generate({"prompt_token_ids": [5]}, greedy(200), name):
                pass

        asked = time.monotonic()
        results = await asyncio.wait_for(asyncio.gather(ask("a"), ask("b"), return_exceptions=True), 60)
        assert all(isinstance(result, RuntimeError if rank else KeyError) for result in results), results
        found = await asyncio.wait_for(engine.failed, 5)
        assert re.fullmatch(reason, found), found
        assert time.monotonic() - asked < 25
        await asyncio.to_thread(until, lambda: not alive(other) and not alive(process.pid), 5, "processes are left")


async def test_while_idle(config, monkeypatch):
    in_rank(1, monkeypatch, "execute_model", fail, at=-1)     # Never.
    async with engine_client.in_own_process(*config) as engine:
        (process, ) = multiprocessing.active_children()
        os.kill(*children(process.pid), signal.SIGKILL)
        assert re.fullmatch(KILLED, await asyncio.wait_for(engine.failed, 5))
        await asyncio.to_thread(until, lambda: not alive(process.pid), 5, "the engine is left")


async def test_an_engine_that_is_stuck_is_ended_with_its_ranks(config, monkeypatch):
    """The server ends while a rank is stopped: the first one, inside a collective, cannot be asked."""
    in_rank(1, monkeypatch, "execute_model", stop, at=6)
    monkeypatch.setattr(engine_client, "END_PATIENCE", 1.0)
    async with engine_client.in_own_process(*config) as engine:
        (process, ) = multiprocessing.active_children()
        (rank, ) = children(process.pid)
        asking = asyncio.ensure_future(anext(engine.client.generate({"prompt_token_ids": list(range(2, 250))},
                                                                    greedy(200), "a")))
        await asyncio.to_thread(until, lambda: "is stopped" in ranks._state(rank), 20, "it computes")
    asking.cancel()
    assert not alive(process.pid)
    await asyncio.to_thread(until, lambda: not alive(rank), 5, "the stopped rank is left")


class TestServer:
    """The whole server, as a person starts it."""

    @pytest.fixture
    def server(self, model, tmp_path):
        port = free_port()
        server = ServerProcess([
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "llm",
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048", "-tp", "2",
            "--num-gpu-blocks-override", "512"], port, tmp_path / "log")
        yield server.wait_until_ready()
        server.process.kill()

    def test_a_rank_that_is_killed(self, server):
        """Both requests are told, the next one is answered by other ranks, and of the lost ones nothing is left. Then
        the end, as a supervisor asks for it: of all processes at a time."""
        engine = int(re.findall(r"engine process (\d+)", server.output())[-1])
        (rank, ) = children(engine)
        shared = set(re.findall(r"psm_\w+", Path(f"/proc/{engine}/maps").read_text()))
        assert shared and all(Path("/dev/shm", name).exists() for name in shared)
        body = {"max_tokens": 2000, "ignore_eos": True}
        answers = {}

        def ask_whole():
            answers["whole"] = server.post(**body)

        whole = threading.Thread(target=ask_whole)
        whole.start()
        chat = {"model": "llm", "messages": [{"role": "user", "content": "Hello"}], "stream": True, **body}
        with httpx.stream("POST", server.url("/v1/chat/completions"), json=chat, timeout=60) as stream:
            lines = stream.iter_lines()
            for _ in range(10):
                next(lines)
            os.kill(rank, signal.SIGKILL)
            killed = time.monotonic()
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        whole.join(20)
        assert time.monotonic() - killed < 20
        errors = [json.loads(events[-2])["error"], answers["whole"].json()["error"]]
        assert events[-1] == "[DONE]" and answers["whole"].status_code == 500
        for error in errors:
            assert (error["type"], error["code"]) == ("server_error", "engine_lost")
            assert re.search(KILLED, error["message"]) and "chatcmpl-" in error["message"], error
        assert server.get("/health").status_code == 503
        assert server.post().status_code == 200 and server.get("/health").status_code == 200
        assert not alive(rank) and not alive(engine)
        assert not any(Path("/dev/shm", name).exists() for name in shared), "shared memory is left"
        assert not [line for line in server.output().splitlines() if line.startswith("vllm: error: ")]

        engine = int(re.findall(r"engine process (\d+)", server.output())[-1])
        everybody = [server.process.pid, engine, *children(engine)]
        with httpx.stream("POST", server.url("/v1/chat/completions"), json={**chat, "max_tokens": 300},
                          timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            for pid in everybody:
                os.kill(pid, signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length" and events[-1] == "[DONE]", events[-3:]
        assert server.end() == 0
        assert not any(map(alive, everybody))
        # They were told, and had no reason to wait for one another.
        assert "is killed" not in server.output().rpartition("Shutting down")[2], server.output()[-2000:]
