"""A server that says what a test tells it to: no model, any answer, right or wrong."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """body: JSON, or the text itself. status: 0 closes the connection without an answer. after: seconds; every: seconds
    between its bytes."""

    status: int
    body: Any = None
    kind: str = "application/json"
    after: float = 0.0
    every: float = 0.0

    @property
    def raw(self) -> bytes:
        return (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()


@dataclass(frozen=True)
class Asked:
    """A request that came. body: its JSON, {} without one."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any] = field(default_factory=dict)


REFUSED = Reply(400, {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}})
BROKEN = Reply(500, {"error": {"message": "down", "type": "server_error", "param": None, "code": None}})
GONE = Reply(0)
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Beijing"}'}}


def says(content: str | None = "", thought: str = "", finish: str = "stop", tokens: int = 5, **message: Any) -> Reply:
    """A whole answer. message: further fields of it."""
    made = {"role": "assistant", "content": content, **({"reasoning_content": thought} if thought else {}), **message}
    return Reply(200, {"object": "chat.completion", "choices": [{"index": 0, "message": made, "finish_reason": finish}],
                       "usage": {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}})


def streams(*deltas: Mapping[str, Any], usage: Mapping[str, Any] | None = None, done: int = 1,
            prefix: str = "data: ") -> Reply:
    """A streamed answer."""
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if usage is not None:
        chunks.append({"choices": [], "usage": usage})
    lines = [prefix + json.dumps(chunk) for chunk in chunks] + [f"{prefix}[DONE]"] * done
    return Reply(200, "\n\n".join(lines) + "\n\n", "text/event-stream")


def words(count: int) -> list[dict[str, str]]:
    """So many deltas with text."""
    return [{"content": "word "}] * count


USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
STREAMED = streams(*words(5), usage=USAGE)
Answerer = Callable[[Asked], Reply]


@contextlib.contextmanager
def served(answer: Answerer) -> Iterator[str]:
    """The base URL of a server that answers so."""
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            reply = answer(Asked(self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            if reply.after:
                time.sleep(reply.after)
            if not reply.status:
                self.close_connection = True
                return
            # Who is late finds its client gone.
            with contextlib.suppress(ConnectionError):
                self.send_response(reply.status)
                self.send_header("Content-Type", reply.kind)
                self.send_header("Content-Length", str(len(reply.raw)))
                self.end_headers()
                if not reply.every:
                    self.wfile.write(reply.raw)
                    return
                for byte in reply.raw:
                    time.sleep(reply.every)
                    self.wfile.write(bytes([byte]))

        do_GET = do_POST = handle_one

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Script:
    """Answers a run of the whole program: what a server is asked beside chat, two trials of the thinking switch, then
    one reply after the other. chats: the chat requests that came, trials included."""

    TRIALS = (says("4", "2+2 is 4."), says("4"))

    def __init__(self, replies: Sequence[Reply]) -> None:
        self._replies = [*self.TRIALS, *replies]
        self.chats: list[Asked] = []

    def __call__(self, asked: Asked) -> Reply:
        if asked.path == "/v1/models":
            return Reply(200, {"data": [{"id": "llm", "max_model_len": 262144}]})
        if asked.path == "/version":
            return Reply(200, {"version": "1"})
        if asked.path != "/v1/chat/completions":
            return Reply(404, {})
        self.chats.append(asked)
        return self._replies[len(self.chats) - 1]
