"""The real server in a process of its own, asked over HTTP as a client would."""
from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

# Generous: on a busy machine the imports of two processes alone take a minute.
START_S = 240


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class ServerProcess:
    """The server's process and what it wrote. `post` sends a small request that the body's fields complete."""

    def __init__(self, command: Sequence[str | Path], port: int, log: Path, environment: Mapping[str, str] = os.environ,
                 ) -> None:
        self.base, self.port, self.log = f"http://127.0.0.1:{port}", port, log
        with log.open("w") as file:
            self.process = subprocess.Popen(list(command), stdout=file, stderr=subprocess.STDOUT, env=environment)

    def output(self) -> str:
        return self.log.read_text()

    def wait_until_ready(self) -> ServerProcess:
        """Until then nobody can connect: an answer before the server says that it is ready fails the test. A server
        that is given up is ended, since no fixture would."""
        try:
            self._wait_until_ready()
        except BaseException:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.end(ask=True, patience=20)
            raise
        return self

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        answered = None
        while "\nReady: " not in self.output():
            assert self.process.poll() is None, f"the server ended with {self.process.poll()}:\n{self.output()[-3000:]}"
            assert time.monotonic() < deadline, f"not ready after {START_S} s:\n{self.output()[-3000:]}"
            # It listens a moment before the line is written.
            assert answered is None or time.monotonic() - answered < 2, "it answered long before it was ready"
            if answered is None and self._connects():
                answered = time.monotonic()
            time.sleep(0.1)

    def _connects(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def url(self, path: str) -> str:
        return self.base + path

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url(path), timeout=60, follow_redirects=True)

    def post(self, path: str = "/v1/chat/completions", **body) -> httpx.Response:
        default = {"messages": [{"role": "user", "content": "Hello"}]} if "chat" in path else {"prompt": "Hello"}
        return httpx.post(self.url(path), json={"model": "llm", "max_tokens": 8, **default, **body},
                          timeout=START_S)     # It may wait for an engine that is started again.

    def end(self, *, ask: bool = False, patience: float = 60) -> int:
        """The exit code, after SIGTERM if `ask`; kills what does not end within `patience` seconds."""
        try:
            if ask:
                self.process.terminate()
            return self.process.wait(patience)
        finally:
            self.process.kill()
