"""What the server takes on: how large a request may be, how many at a time, and for how long."""

from __future__ import annotations

import gc
import json
import math
import time
from argparse import Namespace
from collections import deque
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from vllm.overlay.serving.errors import SERVER_ERROR, RequestError

# Every value of a JSON text but the last one is followed by one of these. A text may hold them within its strings, too.
_BETWEEN_VALUES = (b",", b":", b"[", b"{")
# Parsing stops everything else for about half a microsecond for each; no prompt of any length has as many.
_MOST_VALUES = 4_000_000
# What is sent above the limit is read, so that the client reads the refusal; up to this many times the limit.
_READ_ANYWAY = 4
_RECENT = 32
_LONGEST_RETRY_AFTER_S = 60


@dataclass(frozen=True)
class Limits:
    """max_bytes: of a request's body. most: requests under way, running and waiting together; None for any number.
    timeout_s: of a request, from its body to the end of its answer; None for none."""

    max_bytes: int
    most: int | None = None
    timeout_s: float | None = None

    @classmethod
    def of(cls, args: Namespace) -> Limits:
        """What the command line says."""
        queued = args.max_queued_requests
        return cls(args.max_request_bytes, None if queued is None else args.max_num_seqs + queued,
                   args.request_timeout or None)


def timed_out(limit_s: float) -> RequestError:
    """The answer to a request that took too long."""
    return RequestError(f"The request was not finished within the {limit_s:g} s that this server gives it "
                        "(--request-timeout).", status=504, kind=SERVER_ERROR, code="timeout")


class Admission:
    """Counts the requests under way."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._under_way = 0
        self._took: deque[float] = deque(maxlen=_RECENT)

    def enter(self) -> Place:
        """A place for one request. Raises RequestError (429) where all are taken."""
        most = self._limits.most
        if most is not None and self._under_way >= most:
            error = RequestError(f"{self._under_way} requests are under way, which is all that this server takes on "
                                 "(--max-queued-requests); please try again later.", status=429,
                                 kind="rate_limit_error", code="rate_limit_exceeded")
            error.headers["Retry-After"] = str(self._until_one_ends(most))
            raise error
        self._under_way += 1
        return Place(self)

    def _until_one_ends(self, most: int) -> int:
        """Seconds, by what requests took lately."""
        mean = sum(self._took) / len(self._took) if self._took else 1.0
        return min(max(math.ceil(mean / most), 1), _LONGEST_RETRY_AFTER_S)

    def leave(self, took_s: float) -> None:
        """One less is under way."""
        self._under_way -= 1
        self._took.append(took_s)


class Place:
    """One request's place, given back once."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission
        self._since = time.monotonic()

    def leave(self) -> None:
        """Give it back; a second time nothing happens."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.leave(time.monotonic() - self._since)


async def read_json(request: Request, limits: Limits) -> Any:
    """The request's JSON body, whatever Content-Type says. Raises RequestError for what is too large or no JSON."""
    raw = await _read(request, limits.max_bytes)
    if sum(map(raw.count, _BETWEEN_VALUES)) > _MOST_VALUES:
        raise RequestError(f"The body holds more than {_MOST_VALUES} values.", code="request_too_large", status=413)
    collects = gc.isenabled()
    # Looking for garbage among millions of new objects would take many times as long as making them.
    gc.disable()
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from None
    finally:
        if collects:
            gc.enable()


async def _read(request: Request, most: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= most:
            chunks.append(chunk)
        elif chunks:
            chunks.clear()
        if size > _READ_ANYWAY * most:
            break
    if size > most:
        raise RequestError(f"The body is larger than the {most} bytes that this server takes (--max-request-bytes).",
                           code="request_too_large", status=413)
    return b"".join(chunks)
