"""The whole server in this process, over a tiny hybrid model: the engine in one thread, HTTP in another. A test asks it
over sockets, and can look into both, slow them down and break them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from tests.helpers.engine_thread import serve_in_thread
from tests.helpers.tokenizer import added_token_ids, tokenizer_folder
from tests.models.shapes import moe, text
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.multiprocessing.engine import MQLLMEngine
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.overlay.serving import server
from vllm.overlay.serving.app import build_app, init_app_state
from vllm.overlay.serving.patient_client import PatientClient
from vllm.overlay.serving.service import Service
from vllm.usage.usage_lib import UsageContext
from vllm.utils import FlexibleArgumentParser
from worklogs.random_checkpoint import write_checkpoint

SMALL = 479
PLACES = 2
# Tokens of a step.
BUDGET = 32
CONTEXT = 2048
MESSAGES = [{"role": "user", "content": "Hello"}]


def tiny_hybrid(folder: Path) -> Path:
    """A checkpoint with linear and full attention, experts, a tokenizer and a template. It never ends an answer."""
    tokens = added_token_ids(SMALL)
    end = tokens["<|im_end|>"]
    config = {**text(64, 4, 4, (4, 2, 32), (2, 4, 16, 16), 4, 0.5, **moe(4, 2, 24, 40)),
              "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "dtype": "float32",
              "tie_word_embeddings": False, "vocab_size": SMALL + len(tokens), "max_position_embeddings": CONTEXT,
              "eos_token_id": end}
    files = {file.name: file for file in tokenizer_folder(small=SMALL).iterdir()}
    write_checkpoint(folder, config, seed=3, copied_files=files)
    return folder


class LiveServer:
    """steps: the request ids of every step of the model so far. pace: seconds that a step takes at least."""

    def __init__(self, model: Path, sockets: Path, *arguments: str) -> None:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args([
            "--model", str(model), "--served-model-name", "llm", "--dtype", "float32", "--max-model-len", str(CONTEXT),
            "--max-num-seqs", str(PLACES), "--max-num-batched-tokens", str(BUDGET), "--enable-chunked-prefill",
            "--enable-prefix-caching", "--num-gpu-blocks-override", "600", "--enable-auto-tool-choice",
            "--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3", "--disable-log-requests", *arguments])
        engine_args = AsyncEngineArgs.from_cli_args(args)
        self._args, self._config = args, engine_args.create_engine_config()
        self.tokenizer = server.load_tokenizer(self._config.model_config)
        self._path = f"ipc://{sockets}/engine"
        self.process = MQLLMEngine.from_engine_args(engine_args, UsageContext.API_SERVER, self._path)
        self.engine = self.process.engine
        self.steps: list[list[str]] = []
        self.pace = 0.0
        self._watch_steps()
        self._stop_engine, self._engine_thread = serve_in_thread(self.process)
        ready: threading.Event = threading.Event()
        self._http_thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._http_thread.start()
        assert ready.wait(60), "it does not listen"

    def _watch_steps(self) -> None:
        stock = self.engine.model_executor.execute_model

        def execute_model(execute_model_req: Any) -> Any:
            self.steps.append([group.request_id for group in execute_model_req.seq_group_metadata_list])
            if self.pace:
                time.sleep(self.pace)
            return stock(execute_model_req=execute_model_req)

        self.engine.model_executor.execute_model = execute_model

    async def _serve(self, ready: threading.Event) -> None:
        self.loop = asyncio.get_running_loop()
        self.client = PatientClient(self._path, self._config)
        await self.client.setup()
        self.service = Service(self.client, self.tokenizer, server.settings(self._args, self._config))
        self.app = build_app(self._args)
        init_app_state(self.app.state, self.service, self._config.model_config)
        sock = server.bind("127.0.0.1", 0)
        # Little of what a client does not read goes into the system's buffers.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.port = sock.getsockname()[1]
        self.http = server._Server(uvicorn.Config(self.app, log_level="warning", access_log=False))
        serving = asyncio.ensure_future(self.http.serve(sockets=[sock]))
        while not self.http.started:
            await asyncio.sleep(0.01)
        ready.set()
        await serving
        self._stop_engine.set()
        await self.client.abort("nobody")       # Something to wake up for.
        await asyncio.to_thread(self._engine_thread.join, 30)
        self.client.close()
        self.service.close()

    def close(self) -> None:
        self.http.should_exit = self.http.force_exit = True
        self._http_thread.join(60)
        assert not self._http_thread.is_alive() and not self._engine_thread.is_alive()

    def in_loop(self, function: Callable[[], Any]) -> Any:
        """The result of a function that is called in the event loop's thread."""
        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(30)

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self.port}{path}", json=request_body(path, **body), timeout=60)

    def open(self, path: str = "/v1/chat/completions", cut: int | None = None, **body: Any) -> Asked:
        """Sends a request and does not wait. cut: bytes of the body that are sent."""
        return Asked(self.port, path, request_body(path, **body), cut)

    @contextlib.contextmanager
    def slow(self, pace: float) -> Iterator[None]:
        self.pace = pace
        try:
            yield
        finally:
            self.pace = 0.0

    def until(self, what: Callable[[], Any], why: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"not within {seconds} s: {why}; {self.left()}"
            time.sleep(0.002)

    def until_idle(self) -> None:
        """Nobody has anything to do any more, and nothing is left of any request."""
        self.until(lambda: not self.left(), "something is left")

    def left(self) -> dict[str, Any]:
        """What there still is of requests, in the engine and before it."""
        engine, (scheduler, ) = self.engine, self.engine.scheduler
        manager = scheduler.block_manager
        total = engine.cache_config.num_gpu_blocks
        context = engine.scheduler_contexts[0]
        found = {
            "waiting": len(scheduler.waiting), "running": len(scheduler.running), "swapped": len(scheduler.swapped),
            "slots": PLACES - scheduler.slots.num_free,
            "blocks": total - manager.get_num_free_gpu_blocks(), "block tables": len(manager.block_tables),
            "samples": len(engine.fanouts._children), "requests of samples": len(engine.fanouts._parents),
            "failures": len(engine._failures), "grammars": len(engine.grammars),
            "outputs": len(context.output_queue),
            "queues": len(self.client.output_queues),
            "admitted": self.app.state.admission._under_way if hasattr(self.app.state, "admission") else 0,
            "tasks": len(self.tasks()),
        }
        return {name: count for name, count in found.items() if count}

    def tasks(self) -> list[str]:
        """Of the event loop, those that work on requests."""
        tasks = self.in_loop(lambda: [task.get_coro().__qualname__ for task in asyncio.all_tasks()])
        own = ("LiveServer._serve", "Server.serve", "MQLLMEngineClient.", "PatientClient.", "LiveServer.in_loop")
        return [name for name in tasks if not name.startswith(own) and "lifespan" not in name.lower()]


def request_body(path: str, **body: Any) -> dict[str, Any]:
    given = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": MESSAGES}
    return {"model": "llm", "temperature": 0, "ignore_eos": True, "max_tokens": 8, **given, **body}


class Asked:
    """A request that was sent over a socket of its own, which can be read slowly and closed at any time."""

    def __init__(self, port: int, path: str, body: dict[str, Any], cut: int | None) -> None:
        content = json.dumps(body).encode()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", port))
        self._socket.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                             f"Content-Length: {len(content)}\r\n\r\n".encode() + content[:cut])

    def read(self, count: int = 1) -> bytes:
        self._socket.settimeout(30)
        return self._socket.recv(count)

    def leave(self) -> None:
        self._socket.close()
