"""A server that knows no model: it answers every chat completion with recorded chunks on a fixed schedule.

    python worklogs/stub_server.py --port 8077 [--recording FILE] [--log FILE]

It is the measure of programs that measure servers: what it flushed, and when, is in its log, one JSON line per request:
{"id", "received_s", "due_s", "flushed_s", "recording", "sent": path and fields of the body}, times of time.monotonic().

A recording is a JSON list of answers; the i-th request gets the i-th, round and round. An answer is
  {"status": 200, "chunks": [[seconds since the request came, "bytes of the body as text"], ...]}
with $ID for the answer's id; a chunk of null cuts the connection. --recording default: EXAMPLE, an answer with all that
a stream may hold: a delta with a role only, thoughts, content, a call, two events in one chunk, an event in two.

Prints `Ready: URL` when it can be asked. Ends with SIGTERM or SIGINT.
"""
import argparse
import asyncio
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

Answer = dict[str, Any]
KEPT = ("model", "stream", "max_tokens", "stream_options", "cache_salt", "ignore_eos", "min_tokens", "temperature")


def event(choices: list[dict[str, Any]], **more: Any) -> str:
    """One event of a stream."""
    found = {"id": "$ID", "object": "chat.completion.chunk", "created": 0, "model": "llm", "choices": choices, **more}
    return f"data: {json.dumps(found)}\n\n"


def delta(finish: str | None = None, **fields: Any) -> str:
    """An event with one choice."""
    return event([{"index": 0, "delta": fields, "finish_reason": finish}])


def usage(prompt: int, completion: int, cached: int | None, reasoning: int | None = None) -> str:
    """The event that tells how many tokens there were."""
    found: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion,
                             "total_tokens": prompt + completion}
    if cached is not None:
        found["prompt_tokens_details"] = {"cached_tokens": cached}
    if reasoning is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return event([], usage=found)


def answer(wait: float, step: float, words: int, prompt: int, cached: int | None, finish: str = "stop") -> Answer:
    """A plain answer: the first word after `wait` seconds, each following `step` later, one token each."""
    chunks: list[list[Any]] = [[0.0, delta(role="assistant", content="")]]
    chunks += [[wait + step * index, delta(content=f"word{index} ")] for index in range(words)]
    end = wait + step * (words - 1)
    chunks[-1][1] += delta(finish) + usage(prompt, words, cached) + "data: [DONE]\n\n"
    chunks[-1][0] = end
    return {"status": 200, "chunks": chunks}


def _example() -> list[Answer]:
    call = [{"index": 0, "id": "call-1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    split = delta(content="split in two")
    return [
        {"status": 200, "chunks": [
            [0.02, delta(role="assistant", content="")], [0.50, delta(reasoning_content="a thought")],
            [0.70, delta(content="two events ") + delta(content="at once")], [0.90, split[:40]], [1.00, split[40:]],
            [1.10, delta(tool_calls=call)], [1.30, delta("tool_calls")], [1.50, usage(1000, 6, 640, 1)
                                                                          + "data: [DONE]\n\n"]]},
        answer(0.30, 0.10, 11, 500, 0), answer(0.80, 0.20, 4, 2000, 1984), answer(0.60, 0.05, 21, 3000, None, "length"),
    ]


EXAMPLE = _example()


class Stub:
    """What the server knows."""

    def __init__(self, recording: list[Answer], log: Path | None = None) -> None:
        self.recording, self.log = recording, log
        self.requests: list[dict[str, Any]] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A chat completion."""
        received = time.monotonic()
        index = len(self.requests)
        entry: dict[str, Any] = {"id": f"stub-{index}", "received_s": received,
                                 "recording": index % len(self.recording), "due_s": [], "flushed_s": []}
        self.requests.append(entry)
        try:
            body = await request.json()
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise web.HTTPBadRequest(text="the body is no JSON object")
        entry["sent"] = {"path": request.path, "messages": len(body.get("messages") or ()),
                         **{name: body[name] for name in KEPT if name in body}}
        found = self.recording[entry["recording"]]
        response = web.StreamResponse(status=found["status"], headers={
            "Content-Type": "text/event-stream" if found["status"] == 200 else "application/json"})
        response.enable_chunked_encoding()
        try:
            await response.prepare(request)
            for offset, text in found["chunks"]:
                due = received + offset
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if text is None:
                    if request.transport is not None:
                        request.transport.abort()
                    break
                # Stamped before: the reader may run before this process does again.
                entry["due_s"].append(due)
                entry["flushed_s"].append(time.monotonic())
                await response.write(text.replace("$ID", entry["id"]).encode())
        finally:
            # Also of a client that went before the end.
            if self.log is not None:
                with self.log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
        return response

    def app(self) -> web.Application:
        """Its routes."""
        async def models(request: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": "llm", "object": "model", "created": 0,
                                                                  "owned_by": "stub", "max_model_len": 262144}]})

        async def version(request: web.Request) -> web.Response:
            return web.json_response({"version": "stub"})

        async def health(request: web.Request) -> web.Response:
            return web.Response()

        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.post("/v1/chat/completions", self.complete), web.get("/v1/models", models),
                        web.get("/version", version), web.get("/health", health)])
        return app


async def serve(stub: Stub, port: int) -> None:
    """Until it is told to end."""
    runner = web.AppRunner(stub.app(), access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    print(f"Ready: http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await ended.wait()
    await runner.cleanup()


def read(path: Path) -> list[Answer]:
    """A recording.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--recording {path}: does not parse: {error}") from error
    if not isinstance(found, list) or not found:
        raise ValueError(f"--recording {path}: is no list of answers")
    for index, one in enumerate(found):
        chunks = one.get("chunks") if isinstance(one, dict) else None
        if not isinstance(chunks, list) or not chunks or not all(map(_chunk, chunks)) or one.get("status") not in range(
                100, 600):
            raise ValueError(f"--recording {path}: answer {index} is not {{\"status\": 100 to 599, \"chunks\": "
                             "[[seconds, text], ...]}")
    return found


def _chunk(found: Any) -> bool:
    return (isinstance(found, list) and len(found) == 2 and isinstance(found[0], int | float)
            and 0 <= found[0] < math.inf and isinstance(found[1], str | None))


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--recording", type=Path)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args(arguments)
    if not 0 <= options.port < 65536:
        parser.error("--port is from 0 to 65535")
    try:
        recording = read(options.recording) if options.recording else EXAMPLE
        if options.log is not None and (options.log.is_dir() or not options.log.parent.is_dir()):
            raise ValueError(f"--log {options.log}: give a file in a folder that is there")
        asyncio.run(serve(Stub(recording, options.log), options.port))
    except (OSError, ValueError) as error:
        print(f"stub_server: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
