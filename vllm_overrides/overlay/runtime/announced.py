"""The back ends that the server named in its start line, binding for the engine's process and every worker.

They inherit the names by an environment variable and compare their own choices with it: a worker on which a library
does not load must not compute by another back end than everybody reads in the log.
"""
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

VARIABLE = "VLLM_OVERLAY_ANNOUNCED"


@contextmanager
def announced(choices: Mapping[str, str]) -> Iterator[None]:
    """Context in which this process and those that it starts use no other back ends. choices: operator -> back end."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ",".join(f"{what}={name}" for what, name in choices.items())
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def agree(what: str, name: str, how: str) -> None:
    """Whoever chose back end `name` for operator `what` says so here; nothing happens where no server announced any.

    how: what to set, so that this back end is used everywhere.

    Raises:
        RuntimeError: the server announced another one.
    """
    said = dict(entry.split("=", 1) for entry in os.environ.get(VARIABLE, "").split(",") if entry)
    if said.get(what, name) != name:
        raise RuntimeError(f"{what}: the server announced back end {said[what]}, but process {os.getpid()} can only "
                           f"use {name} (its output says why): repair that, or set {how}")
