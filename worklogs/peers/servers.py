"""One server at a time: started by serve.sh or by a command of yours, waited for, ended with all that it started."""
import contextlib
import http.client
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
KINDS = ("ours", "vllm", "llama", "transformers")
GRACE_S = 20.0


class ServerFailed(Exception):
    """It did not start, or did not end; one line."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def command(kind: str, model: Path, port: int, arguments: str = "", own: str | None = None) -> list[str]:
    """What starts a server. own: a command line with {model} and {port} instead of serve.sh; arguments follow both."""
    words = ["bash", str(HERE / "serve.sh"), kind, str(model), str(port)]
    if own:
        words = [word.replace("{model}", str(model)).replace("{port}", str(port)) for word in shlex.split(own)]
    return [*words, *shlex.split(arguments)]


def shown(kind: str, model: Path, arguments: str = "", own: str | None = None) -> str:
    """The command as a record keeps it: the same for every run."""
    return f"{own or f'worklogs/peers/serve.sh {kind} {model.name}'} {arguments}".strip()


@contextlib.contextmanager
def running(words: list[str], port: int, log: Path, patience: float) -> Iterator[int]:
    """The process id of a server that answers /health with 200. Ends its whole process group afterwards.

    Raises:
        ServerFailed: it ends, or does not answer within `patience` seconds, or somebody else has the port.
    """
    if _status(port) is not None:
        raise ServerFailed(f"port {port} is somebody else's")
    with log.open("w") as output, subprocess.Popen(words, stdout=output, stderr=output,
                                                   start_new_session=True) as process:
        try:
            until = time.monotonic() + patience
            while _status(port) != 200:
                if process.poll() is not None:
                    raise ServerFailed(f"the server ended with {process.returncode}: {_last(log)}")
                if time.monotonic() > until:
                    raise ServerFailed(f"the server did not answer within {patience:g} s: {_last(log)}")
                time.sleep(0.2)
            yield process.pid
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM for the group, SIGKILL for what is left of it."""
    for number, grace in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        until = time.monotonic() + grace
        while time.monotonic() < until:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def _status(port: int) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _last(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:200] if lines else 'it wrote nothing'} (log: {log})"
