"""A client for an OpenAI-compatible server on this machine that says how many prompt tokens came from a cache."""
import dataclasses
import http.client
import json
import os
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench import process_tree  # noqa: E402

# Where each kind of server says how many tokens of a prompt it did not compute.
SOURCES = {
    "ours": "usage.prompt_tokens_details.cached_tokens",
    "vllm": "usage.prompt_tokens_details.cached_tokens",
    "llama": "timings.cache_n",
}


class RequestFailed(Exception):
    """A request was not answered as expected; one line."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """prompt, cached: tokens by the server's word; cached is None where it says nothing. seconds: from sending to the
    last byte."""

    prompt: int
    cached: int | None
    seconds: float
    text: str = ""


class Client:
    """One server. A connection per request, so that threads may share it."""

    def __init__(self, base_url: str, kind: str, model: str, timeout: float = 1800.0) -> None:
        """Raises:
            ValueError: the URL is none, or not one of this machine.
        """
        try:
            url = urllib.parse.urlsplit(base_url)
            port = url.port
        except ValueError as error:
            raise ValueError(f"--base-url {base_url} is not http://HOST:PORT: {error}") from error
        if url.scheme != "http" or not url.hostname or not port:
            raise ValueError(f"--base-url {base_url} is not http://HOST:PORT")
        self.host, self.port, self.path = url.hostname, port, url.path.rstrip("/").removesuffix("/v1")
        self.kind, self.model, self.timeout = kind, model, timeout

    def complete(self, ids: list[int], max_tokens: int = 1) -> Answer:
        """/v1/completions with token ids, greedy, not streamed."""
        return self._ask("/v1/completions", {"prompt": ids, "max_tokens": max_tokens, "temperature": 0})

    def chat(self, messages: list[dict[str, Any]], thinking: bool, tools: list[dict[str, Any]] | None = None,
             max_tokens: int = 1) -> Answer:
        """/v1/chat/completions, greedy, not streamed."""
        body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens, "temperature": 0,
                                "chat_template_kwargs": {"enable_thinking": thinking}}
        if tools:
            body["tools"] = tools
        return self._ask("/v1/chat/completions", body)

    def get(self, path: str) -> Any:
        """A JSON document of the server, or its text.

        Raises:
            RequestFailed: not answered with 200.
        """
        return self._send("GET", path, None)[0]

    def _ask(self, path: str, body: dict[str, Any]) -> Answer:
        body = {"model": self.model, **body}
        if self.kind == "llama":
            body["cache_prompt"] = True
        found, seconds = self._send("POST", path, body)
        try:
            usage, choice = found["usage"], found["choices"][0]
            if self.kind == "llama":
                cached = found.get("timings", {}).get("cache_n")
            else:
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            text = choice.get("text") or (choice.get("message") or {}).get("content") or ""
            return Answer(usage["prompt_tokens"], cached, seconds, text)
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailed(f"{path}: unexpected answer {json.dumps(found)[:200]}") from error

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[Any, float]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            data = None if body is None else json.dumps(body)
            start = time.perf_counter()
            connection.request(method, self.path + path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            seconds = time.perf_counter() - start
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise RequestFailed(f"{path}: {response.status} {content[:200].decode(errors='replace')}")
        try:
            return json.loads(content), seconds
        except ValueError:
            return content.decode(errors="replace"), seconds


class OthersMeter:
    """How many cores other processes than the server's and this one used since `start`."""

    def __init__(self, server: int | None) -> None:
        """server: process id whose tree is the server's; None: unknown, and nothing is measured."""
        self.server = server
        self._before = (0.0, 0.0, 0.0)

    def start(self) -> None:
        self._before = self._now()

    def cores(self) -> float | None:
        """None if the server's process is not known, or has gone, and what it used with it."""
        if self.server is None or not lives(self.server):
            return None
        busy, own, wall = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return round(max(0.0, busy - own) / wall, 3) if wall else 0.0

    def _now(self) -> tuple[float, float, float]:
        if self.server is None:
            return 0.0, 0.0, 0.0
        tick = os.sysconf("SC_CLK_TCK")
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
        # Where the server is below this process, this one is in the tree.
        own = 0.0 if self.server == os.getpid() else time.process_time()
        return ((user + nice + system + irq + softirq) / tick, process_tree.seconds(self.server) + own,
                time.perf_counter())


def lives(process: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waited for does not."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
