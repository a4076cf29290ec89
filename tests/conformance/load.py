"""Many clients at once, some of which leave and some of which send nonsense: what a busy server must survive.

    python -m tests.conformance.load --base-url http://127.0.0.1:8000 [--clients 64] [--requests 40]
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import sys
import time
from typing import Any

import httpx

LEAVE, NONSENSE = 0.10, 0.05
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
    "a": {"type": "string"}}}}}
LATE_S = 240.0


def normal(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A short request of some kind, as (path, body)."""
    text = " ".join(chance.choices(["river", "mountain", "北京", "🎉", "x = [1, 2]", "\n"], k=chance.randint(1, 12)))
    few, stream = chance.randint(1, 8), chance.random() < 0.6
    talk = [{"role": "user", "content": text}]
    return chance.choice([
        ("/v1/chat/completions", {"messages": talk, "max_tokens": few, "stream": stream}),
        ("/v1/chat/completions", {"messages": talk, "max_tokens": few, "stream": stream, "tools": [TOOL], "seed": 1}),
        ("/v1/chat/completions", {"messages": talk, "max_tokens": few, "stream": stream, "n": 2, "logprobs": True}),
        ("/v1/chat/completions", {"messages": talk, "max_tokens": few, "stream": stream,
                                  "response_format": {"type": "json_object"}, "reasoning_effort": "none"}),
        ("/v1/completions", {"prompt": text, "max_tokens": few, "stream": stream}),
        ("/v1/responses", {"input": text, "max_output_tokens": few, "stream": stream}),
        ("/v1/messages", {"messages": talk, "max_tokens": few, "stream": stream}),
    ])


NONSENSES: list[tuple[str, bytes]] = [
    ("/v1/chat/completions", b"{"), ("/v1/chat/completions", b"[]"), ("/v1/chat/completions", b"\xff\xfe{}"),
    ("/v1/chat/completions", b'{"model": "llm", "messages": [{"role": "user", "content": 5}]}'),
    ("/v1/chat/completions", b'{"model": "llm", "messages": [], "temperature": NaN}'),
    ("/v1/chat/completions", b'{"model": "nobody", "messages": [{"role": "user", "content": "hi"}]}'),
    ("/v1/chat/completions", b'{"model": "llm", "messages": [{"role": "user", "content": "hi"}], "max_tokens": -1}'),
    ("/v1/completions", b'{"model": "llm", "prompt": [[]]}'), ("/v1/responses", b'{"model": "llm", "input": {}}'),
    ("/v1/messages", b'{"model": "llm", "max_tokens": 5}'), ("/v1/nothing", b"{}"),
    ("/v1/chat/completions", b"[" * 50000),
]


class Load:
    """sent: how many requests; outcomes: how often which of them ended how; wrong: what should not have happened, as
    text."""

    def __init__(self, base: str, model: str = "llm", seed: int = 0) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.sent = 0
        self._base, self._model, self._seed = base.rstrip("/").removesuffix("/v1"), model, seed

    async def run(self, clients: int, requests: int) -> None:
        """Every client sends its requests one after the other."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
        async with httpx.AsyncClient(base_url=self._base, timeout=LATE_S, limits=limits) as http:
            await asyncio.gather(*[self._client(http, random.Random(f"{self._seed} {i}"), requests)
                                   for i in range(clients)])

    async def _client(self, http: httpx.AsyncClient, chance: random.Random, requests: int) -> None:
        for _ in range(requests):
            kind = chance.random()
            self.sent += 1
            try:
                if kind < LEAVE:
                    await self._leaves(http, chance)
                elif kind < LEAVE + NONSENSE:
                    await self._nonsense(http, chance)
                else:
                    await self._asks(http, chance)
            except httpx.HTTPError as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    async def _asks(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        path, body = normal(chance)
        got = await http.post(path, json={"model": self._model, **body})
        self.outcomes[f"{path} {got.status_code}"] += 1
        text = got.text
        ended = not body["stream"] or any(word in text[-2000:] for word in (
            "data: [DONE]", "event: message_stop", "event: response.completed", "event: response.incomplete"))
        if got.status_code != 200 or not ended:
            self.wrong.append(f"{got.status_code} {text[-300:]} for {json.dumps(body)[:300]}")

    async def _leaves(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        """Asks for more than would ever end, and goes: while it waits, or when the first words have come."""
        path, body = normal(chance)
        body = {"model": self._model, **body, "ignore_eos": True,
                ("max_output_tokens" if "input" in body else "max_tokens"): 100_000}
        body.pop("response_format", None)
        after = chance.choice([0.0, 0.05, 0.5, None])
        try:
            body["stream"] = body["stream"] or after is None
            await asyncio.wait_for(self._first_words(http, path, body), after)
        except asyncio.TimeoutError:
            self.outcomes["left before the answer"] += 1

    async def _first_words(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        async with http.stream("POST", path, json=body) as got:
            self.outcomes[f"left {got.status_code}"] += 1
            if got.status_code != 200:
                self.wrong.append(f"{got.status_code} for {json.dumps(body)[:300]}")
            async for _ in got.aiter_bytes():
                break

    async def _nonsense(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        path, content = chance.choice(NONSENSES)
        got = await http.post(path, content=content, headers={"Content-Type": "application/json"})
        self.outcomes[f"nonsense {got.status_code}"] += 1
        if not 400 <= got.status_code < 500:
            self.wrong.append(f"{got.status_code} {got.text[:300]} for {content[:100]!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", default="llm")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=40, help="of each client (default 40)")
    args = parser.parse_args()
    load, start = Load(args.base_url, args.model), time.monotonic()
    asyncio.run(load.run(args.clients, args.requests))
    for outcome, count in sorted(load.outcomes.items()):
        print(f"{count:7d} {outcome}")
    print(f"{time.monotonic() - start:.1f} s; wrong: {len(load.wrong)}")
    print("\n".join(load.wrong[:20]))
    return 1 if load.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
