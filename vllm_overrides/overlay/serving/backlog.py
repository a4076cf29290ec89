"""What the engine has said about a request, as long as nobody has taken it: joined, and no more than so much."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.outputs import RequestOutput
from vllm.overlay.serving.errors import RequestError

# Tokens, and alternatives to them where logprobs are asked for: of either about 300 bytes. Whoever is so far behind is
# not going to read on, or asks for more than it can take.
MOST_UNREAD = 1 << 16


class Backlog:
    """One reader's. A reader who is behind finds one output for each prompt, in which all is joined that has come."""

    def __init__(self, most: int = MOST_UNREAD) -> None:
        self._most = most
        self._pending: dict[int, RequestOutput] = {}
        self._unread = 0
        self._end: Exception | None = None
        self._ended = False
        self._news: asyncio.Future[None] | None = None

    def put(self, position: int, output: RequestOutput) -> None:
        """position: of the prompt. output: a delta, which is this object's from now on.

        Raises:
            RequestError: too much has not been read.
        """
        self._unread += sum(map(_size, output.outputs))
        held = self._pending.setdefault(position, output)
        if held is not output:
            _join(held, output)
        self._wake()
        if self._unread > self._most:
            raise RequestError("The answer was ended because it was not read: more than "
                               f"{self._most} tokens and alternatives were waiting.", code="client_too_slow")

    def end(self, error: Exception | None = None) -> None:
        """No more comes. error: what the reader is told after what is pending. Only the first call counts."""
        if not self._ended:
            self._ended, self._end = True, error
            self._wake()

    async def get(self) -> tuple[int, RequestOutput] | None:
        """(position, output) that came first; None at the end. Raises the error that it ended with."""
        if not self._pending and not self._ended:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        if self._pending:
            position = next(iter(self._pending))
            output = self._pending.pop(position)
            self._unread -= sum(map(_size, output.outputs))
            return position, output
        if self._end is not None:
            raise self._end
        return None

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


def _size(one: Any) -> int:
    return len(one.token_ids) + sum(len(entry) for entry in one.logprobs or () if entry)


def _join(held: Any, new: Any) -> None:
    held.finished = new.finished
    held.num_cached_tokens = new.num_cached_tokens
    held.prompt_logprobs = new.prompt_logprobs or held.prompt_logprobs
    known = {one.index: one for one in held.outputs}
    for one in new.outputs:
        mine = known.get(one.index)
        if mine is None:
            held.outputs.append(one)
            continue
        mine.token_ids = _extended(mine.token_ids, one.token_ids)
        if one.logprobs is not None:
            mine.logprobs = _extended(mine.logprobs or [], one.logprobs)
        mine.finish_reason, mine.stop_reason = one.finish_reason, one.stop_reason


def _extended(items: Any, more: Any) -> list[Any]:
    joined: list[Any] = items if isinstance(items, list) else list(items)
    joined.extend(more)
    return joined
