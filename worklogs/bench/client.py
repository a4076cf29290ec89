"""Streams chat completions over HTTP/1.1 and says when what came. Bytes are stamped as the loop hands them over, before
anything is parsed; a loop that is late makes every stamp late, so `LoopLag` measures how late it is.

All times are time.monotonic(), which the processes of one machine share. A connection per request, opened after the
request counts as sent.
"""
import array
import asyncio
import contextlib
import json
import ssl
import time
import urllib.parse
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools

from . import definitions

Clock = Callable[[], float]
# Kept of an answer that is no 2xx, and shown of its message.
MOST_BODY, MOST_WORDS = 65536, 300
# Deltas that must be alike for an ending to count as repetitive.
REPEATED = 10
LAG_STEP_S = 0.005
# A client is healthy if its loop was at most so late: at the 99th percentile, and ever.
HEALTHY_P99_MS, HEALTHY_MAX_MS = 10.0, 100.0


class Reading:
    """What became of one streamed answer: fed with bytes and their stamps, it knows the fields of a sample."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.status: int | None = None
        self.finish: str | None = None
        self.id: str | None = None
        self.error: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.reasoning_tokens: int | None = None
        self.deltas = self.after_finish = 0
        # When each delta came.
        self.stamps = array.array("d")
        self.complete = False
        self._texts: deque[str] = deque(maxlen=REPEATED)
        self._rest = b""
        self._body = b""
        self._framed = self._begun = False
        self._stamp = 0.0
        self._parser = httptools.HttpResponseParser(self)

    @property
    def repetitive(self) -> bool:
        """Whether the last ten text deltas are identical."""
        return len(self._texts) == REPEATED and len(set(self._texts)) == 1

    def feed(self, data: bytes, stamp: float) -> None:
        """Bytes of the response that came at `stamp`.

        Raises:
            httptools.HttpParserError: they are no HTTP.
        """
        self._stamp = self.last = stamp
        self._parser.feed_data(data)

    def ended(self) -> None:
        """The server closed the connection: the end of a body that has no length."""
        if self._begun and not self._framed:
            self.on_message_complete()

    def message(self) -> str:
        """The words of an answer that is no 2xx."""
        text = self._body.decode(errors="replace")
        try:
            found = json.loads(text)
        except ValueError:
            return text
        if isinstance(found, dict):
            inner = found.get("error", found)
            found = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
        return found if isinstance(found, str) else text

    # What httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Tells whether the body has an end of its own."""
        lower = name.lower()
        self._framed |= lower == b"content-length" or (lower == b"transfer-encoding" and b"chunked" in value.lower())

    def on_headers_complete(self) -> None:
        """Before the body."""
        self.status = self._parser.get_status_code()
        self._begun = True

    def on_body(self, data: bytes) -> None:
        """A piece of the body; events may begin and end anywhere in it."""
        if self.status is None or not 200 <= self.status < 300:
            self._body = (self._body + data)[:MOST_BODY]
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        """The whole response is there."""
        if self.status is None or self.status < 200:
            return
        # A last line may have no end.
        if self._rest.startswith(b"data:"):
            self._event(self._rest[5:].strip())
        self._rest = b""
        self.complete = True

    def _event(self, data: bytes) -> None:
        """An event that is not what it should be is an error in the stream, and no error of the transport."""
        if data == b"[DONE]" or not data:
            return
        words = data[:80].decode(errors="replace")
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            self.error = self.error or f"an event is no JSON: {words}"
            return
        if not isinstance(found, dict):
            self.error = self.error or f"an event is no object: {words}"
            return
        if found.get("error"):
            inner = found["error"]
            self.error = str(inner.get("message") if isinstance(inner, dict) else inner)[:MOST_WORDS]
        if isinstance(found.get("id"), str):
            self.id = found["id"]
        self._usage(found)
        choices = found.get("choices") or ()
        if not isinstance(choices, list | tuple) or not all(
                isinstance(choice, dict) and isinstance(choice.get("delta") or {}, dict) for choice in choices):
            self.error = self.error or f"an event's choices are odd: {words}"
            return
        for choice in choices:
            # A completion has its text where a chat has a delta.
            self._delta(choice.get("delta") or {"content": choice.get("text")})
            if choice.get("finish_reason"):
                self.finish = str(choice["finish_reason"])

    def _delta(self, delta: dict[str, Any]) -> None:
        text = "".join(value for name in ("reasoning_content", "reasoning", "content")
                       if isinstance(value := delta.get(name), str))
        if not text and not delta.get("tool_calls"):
            return
        if self.first is None:
            self.first = self._stamp
        self.deltas += 1
        self.stamps.append(self._stamp)
        self.after_finish += self.finish is not None
        if text:
            self._texts.append(text)

    def _usage(self, found: dict[str, Any]) -> None:
        usage, timings = found.get("usage"), found.get("timings")
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
            self.completion_tokens = _count(usage.get("completion_tokens"), self.completion_tokens)
            inner = usage.get("prompt_tokens_details")
            cached = _count(inner.get("cached_tokens"), None) if isinstance(inner, dict) else None
            # The last that is not zero: a stream may tell it at its begin only.
            self.cached_tokens = cached or (self.cached_tokens if self.cached_tokens is not None else cached)
            inner = usage.get("completion_tokens_details")
            if isinstance(inner, dict):
                self.reasoning_tokens = _count(inner.get("reasoning_tokens"), self.reasoning_tokens)
        if isinstance(timings, dict) and self.cached_tokens is None:
            # llama.cpp's server.
            self.cached_tokens = _count(timings.get("cache_n"), None)


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


class _Connection(asyncio.Protocol):
    """Stamps what comes and feeds a Reading."""

    def __init__(self, reading: Reading, clock: Clock) -> None:
        self.reading, self.clock = reading, clock
        self.over: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.heard = clock()

    def data_received(self, data: bytes) -> None:
        self.heard = self.clock()
        try:
            self.reading.feed(data, self.heard)
        except httptools.HttpParserError as error:
            self._end(f"the answer is no HTTP: {error}")
        if self.reading.complete:
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.reading.ended()
        self._end(None if self.reading.complete else str(error or "closed by the server"))

    def _end(self, failure: str | None) -> None:
        if not self.over.done():
            self.over.set_result(failure)


class Client:
    """One server.

    timeout: seconds that the next bytes may take, not the whole answer.
    """

    def __init__(self, base_url: str, timeout: float = 1800.0, api_key: str | None = None,
                 clock: Clock = time.monotonic) -> None:
        """Raises ValueError for what is no URL of a server."""
        try:
            url = urllib.parse.urlsplit(base_url)
            port = url.port
        except ValueError as error:
            raise ValueError(f"{base_url} is not http://HOST:PORT: {error}") from error
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url} is not http://HOST:PORT")
        self.host, self.port = url.hostname, port or (443 if url.scheme == "https" else 80)
        self.path = url.path.rstrip("/").removesuffix("/v1")
        self.timeout, self.clock = timeout, clock
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._key = api_key

    async def stream(self, body: dict[str, Any], start: float = 0.0, reading: Reading | None = None,
                     path: str = "/v1/chat/completions") -> dict[str, Any]:
        """Sends a chat completion (or, to its path, a completion), and returns the fields of a sample that the answer
        decides.

        start: what times count from. reading: is fed with the answer, for callers that want to know more of it.
        """
        payload = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        reading = reading or Reading()
        sent = self.clock()
        kind, error = await self._exchange("POST", path, payload, reading)
        last = reading.last if kind == definitions.OK else None
        return {"class": kind, "status": reading.status, "error": (error or reading.error or "")[:MOST_WORDS] or None,
                "finish": reading.finish, "id": reading.id, "sent_s": sent - start,
                "first_s": None if reading.first is None else reading.first - start,
                "last_s": None if last is None else last - start,
                # What a failed request had taken when it failed.
                "failed_s": self.clock() - start if kind != definitions.OK else None,
                "prompt_tokens": reading.prompt_tokens, "cached_tokens": reading.cached_tokens,
                "completion_tokens": reading.completion_tokens, "reasoning_tokens": reading.reasoning_tokens,
                "deltas": reading.deltas, "after_finish": reading.after_finish, "repetitive": reading.repetitive}

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """(status, JSON or text) of a short request.

        Raises:
            OSError: no answer.
        """
        reading = _Whole()
        payload = b"" if body is None else json.dumps(body).encode()
        kind, error = await self._exchange(method, path, payload, reading)
        if kind in definitions.TRANSPORT:
            raise OSError(f"{path}: {kind}: {error}")
        text = reading.all.decode(errors="replace")
        try:
            return reading.status or 0, json.loads(text)
        except ValueError:
            return reading.status or 0, text

    async def listens(self) -> bool:
        """Whether somebody answers; a server that takes connections and is too busy to answer counts, too."""
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(self.host, self.port, ssl=self._ssl), 5)
        except (OSError, asyncio.TimeoutError):
            return False
        try:
            # A process that is about to be gone may still take a connection.
            writer.write(f"GET {self.path}/health HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n\r\n".encode())
            return bool(await asyncio.wait_for(reader.read(1), 5))
        except asyncio.TimeoutError:
            return True
        except OSError:
            return False
        finally:
            writer.transport.abort()

    async def _exchange(self, method: str, path: str, payload: bytes, reading: Reading) -> tuple[str, str | None]:
        """(class, error)."""
        loop = asyncio.get_running_loop()
        try:
            transport, connection = await asyncio.wait_for(loop.create_connection(
                lambda: _Connection(reading, self.clock), self.host, self.port, ssl=self._ssl), self.timeout)
        except asyncio.TimeoutError:
            return "timeout", f"no connection within {self.timeout:g} s"
        except OSError as error:
            return "connection", error.strerror or str(error)
        try:
            key = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
            transport.write(f"{method} {self.path}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{key}"
                            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
                            "Accept: text/event-stream, application/json\r\nConnection: close\r\n\r\n".encode())
            transport.write(payload)
            connection.heard = self.clock()
            while not connection.over.done():
                left = connection.heard + self.timeout - self.clock()
                if left <= 0:
                    return "timeout", f"nothing for {self.timeout:g} s"
                await asyncio.wait({connection.over}, timeout=left)
            failure = connection.over.result()
        finally:
            transport.abort()
        if failure is not None:
            return ("connection" if reading.status is None else "stream_aborted"), failure
        if reading.status is None or not 200 <= reading.status < 300:
            message = reading.message()
            return definitions.classify(reading.status or 0, message), message
        return definitions.OK, None


class _Whole(Reading):
    """An answer that is no stream."""

    def __init__(self) -> None:
        super().__init__()
        self.all = b""

    def on_body(self, data: bytes) -> None:
        self.all += data


class LoopLag:
    """How late the running event loop wakes who waits for a time: what the stamps may be late by."""

    def __init__(self) -> None:
        self._late = array.array("d")
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LoopLag":
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due, loop.time()) + LAG_STEP_S
            await asyncio.sleep(due - loop.time())
            self._late.append(max(0.0, loop.time() - due))

    def health(self) -> dict[str, Any]:
        """{"loop_lag_ms": {"p50", "p99", "max"}, "healthy", "limits_ms"}; healthy is None if nothing was measured."""
        late = sorted(self._late)
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        values = {name: definitions.percentile(late, share) for name, share in shares.items()}
        lag = {name: None if value is None else round(value * 1000, 3) for name, value in values.items()}
        healthy = None
        if lag["p99"] is not None and lag["max"] is not None:
            healthy = lag["p99"] <= HEALTHY_P99_MS and lag["max"] <= HEALTHY_MAX_MS
        return {"loop_lag_ms": lag, "healthy": healthy, "limits_ms": {"p99": HEALTHY_P99_MS, "max": HEALTHY_MAX_MS}}
