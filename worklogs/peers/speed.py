"""What bench_peers.py measures of one running server. Every measurement becomes a sample:

    {"what", "size", "others_cores", "counted", and its figures, or "failed": one line}

counted says that others left the machine alone meanwhile. What `what` and `size` are:

  prefill      a cold prompt of `size` tokens: seconds, to the whole answer of one token
  cold, warm   a new prompt of `size` tokens, then the same and 20 more: seconds, prompt, cached (as the server reports)
  decode       `size` answers at once, of `tokens` each: tps of all while all run, step_s (bench/steps.py)
  front stream `size` chats at once: cpu_s that the server without its engine used for a streamed token
  front prompt a chat with a prompt of about `size` tokens: cpu_s of the same for the request

Prompts are random token ids (for the front end random words) that no other sample has; greedy, and every answer has
exactly the tokens that were asked for.
"""
import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import definitions, process_tree, steps  # noqa: E402
from bench.client import Client, LoopLag, Reading  # noqa: E402
from bench_client import Client as PlainClient  # noqa: E402
from bench_client import OthersMeter, RequestFailed  # noqa: E402
from peers.servers import ServerFailed  # noqa: E402
from prefix_cache_bench import Prompts  # noqa: E402

# Ids below it are ordinary ones in both slices.
VOCABULARY = 8000
NEW = 20
# Short prompts, which pass quickly, are measured so often per round; those of more tokens once.
REPEATS, SHORT = 3, 2048
STREAM_PROMPT, CHAT_WORDS = 32, 16
# A front end goes on for a moment when its answer has been read.
SETTLE_S = 0.3
Sample = dict[str, Any]
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured. prefill, warm: lengths; streams: answers at once; tokens: of each; repeats: how often, since
    what memory gives changes from one to the next; front_streams, front_tokens, front_prompt: the same of the front
    end."""

    prefill: tuple[int, ...] = (512, 2048, 8192, 32768)
    warm: tuple[int, ...] = (500, 1000, 2048, 6000, 8192, 12000)
    streams: tuple[int, ...] = (1, 4, 16)
    tokens: int = 64
    repeats: int = 9
    front_streams: int = 16
    front_tokens: int = 128
    front_prompt: int = 30_000


class Speed:
    """Measures a server of some kind whose process is `pid`, and says what it does."""

    def __init__(self, port: int, kind: str, pid: int, salt: str, others: float, say: Say) -> None:
        """salt: of the prompts. others: cores that other processes may use in a sample that counts."""
        url = f"http://127.0.0.1:{port}"
        self.plain, self.client, self.kind, self.pid = PlainClient(url, kind, "llm"), Client(url), kind, pid
        self.prompts, self.others, self.say = Prompts(salt, VOCABULARY), others, say
        self.samples: list[Sample] = []

    def first_token(self) -> None:
        """Raises ServerFailed where a short prompt brings no token."""
        try:
            self.plain.complete(self.prompts.ids(STREAM_PROMPT))
        except RequestFailed as error:
            raise ServerFailed(f"the first request failed: {error}") from error

    def version(self) -> str | None:
        """What the server says of itself; None where it says nothing."""
        try:
            found = self.plain.get("/version")
        except RequestFailed:
            return None
        return found.get("version") if isinstance(found, dict) else None

    def warm_up(self, length: int) -> None:
        """Requests that do not count, after which nothing of the first ones' costs is left: a prompt of `length`
        tokens, and answers together."""
        self._checked(lambda: self.plain.complete(self.prompts.ids(length)))
        self._checked(lambda: asyncio.run(self._completions(2, 8)))

    def jobs(self, parts: tuple[str, ...], sizes: Sizes, most_streams: int) -> list[Callable[[], object]]:
        """What measures these parts, a sample or two each, in order. most_streams: answers that it can give at once."""
        found: list[Callable[[], object]] = []
        for part in parts:
            if part == "prefill":
                found += [partial(self._prefill, length) for length in sizes.prefill for _ in range(_repeats(length))]
            elif part == "warm":
                found += [partial(self._warm, length) for length in sizes.warm for _ in range(_repeats(length))]
            elif part in ("decode", "second", "int8"):
                streams = (1, ) if part == "int8" else [number for number in sizes.streams if number <= most_streams]
                found += [partial(self._at_once, number, sizes.tokens) for number in streams
                          for _ in range(sizes.repeats)]
            elif part == "front-end":
                found += [partial(self._sample, "front stream", sizes.front_streams, partial(
                    self._front, sizes.front_streams, CHAT_WORDS, sizes.front_tokens))] * REPEATS
                found += [partial(self._sample, "front prompt", sizes.front_prompt, partial(
                    self._front, 1, sizes.front_prompt, 1))]
        return found

    def _prefill(self, length: int) -> None:
        ids = self.prompts.ids(length)
        self._sample("prefill", length, lambda: self._prompt(ids))

    def _warm(self, length: int) -> None:
        """A cold prompt, and the same again with more behind it."""
        ids = self.prompts.ids(length)
        if "failed" not in self._sample("cold", length, lambda: self._prompt(ids)):
            self._sample("warm", length, lambda: self._prompt(ids + self.prompts.ids(NEW)))

    def _at_once(self, number: int, tokens: int) -> None:
        self._sample("decode", number, lambda: asyncio.run(self._decode(number, tokens)))

    def _prompt(self, ids: list[int]) -> Sample:
        answer = self.plain.complete(ids)
        if answer.prompt != len(ids):
            raise RequestFailed(f"the server counts {answer.prompt} tokens of a prompt of {len(ids)}")
        return {"seconds": round(answer.seconds, 5), "prompt": answer.prompt, "cached": answer.cached}

    async def _decode(self, number: int, tokens: int) -> Sample:
        async with LoopLag() as lag:
            readings, completions = await self._completions(number, tokens)
        found = steps.measured([reading.stamps for reading in readings], completions)
        return {"tokens": tokens, "tps": found["aggregate_tps"], "step_s": found["step_s"]["p50"],
                "tokens_per_step": found["tokens_per_step"], "window_s": found["window_s"],
                "loop_lag_ms": lag.health()["loop_lag_ms"]["max"]}

    async def _completions(self, number: int, tokens: int) -> tuple[list[Reading], list[int]]:
        return await self._streamed("/v1/completions", tokens, [
            {"prompt": self.prompts.ids(STREAM_PROMPT)} for _ in range(number)])

    async def _streamed(self, path: str, tokens: int, bodies: list[Sample]) -> tuple[list[Reading], list[int]]:
        """Answers at once, and their tokens.

        Raises:
            RequestFailed: one of them failed, or has another number of tokens.
        """
        readings = [Reading() for _ in bodies]
        found = await asyncio.gather(*(self.client.stream(
            {"model": "llm", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0,
             "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, **body}, 0.0, reading, path)
            for body, reading in zip(bodies, readings, strict=True)))
        for one in found:
            if one["class"] != definitions.OK or one["error"]:
                raise RequestFailed(f"{path}: {one['class']}: {one['error']}")
            if one["completion_tokens"] != tokens:
                raise RequestFailed(f"{path}: {one['completion_tokens']} tokens instead of {tokens}")
        return readings, [one["completion_tokens"] for one in found]

    def _front(self, number: int, words: int, tokens: int) -> Sample:
        bodies = [{"messages": [{"role": "user", "content": self.prompts.words(words)}]} for _ in range(number)]
        before, start = process_tree.front_end_seconds(self.pid), time.perf_counter()
        readings, completions = asyncio.run(self._streamed("/v1/chat/completions", tokens, bodies))
        seconds = time.perf_counter() - start
        time.sleep(SETTLE_S)
        used = process_tree.front_end_seconds(self.pid) - before
        return {"cpu_s": used / sum(completions) if tokens > 1 else used / number, "used_s": round(used, 3),
                "seconds": round(seconds, 3), "tokens": sum(completions), "prompt": readings[0].prompt_tokens}

    def _sample(self, what: str, size: int, measure: Callable[[], Sample]) -> Sample:
        """Measures, and keeps the sample; a failure that the server survives is one.

        Raises:
            ServerFailed: it is gone.
        """
        meter = OthersMeter(self.pid)
        meter.start()
        found: Sample = {"what": what, "size": size}
        try:
            found |= self._checked(measure)
        except (RequestFailed, steps.NotTogether, process_tree.NoEngine) as error:
            found["failed"] = str(error)[:300]
        cores = meter.cores()
        found |= {"others_cores": cores, "counted": cores is not None and cores <= self.others}
        self.samples.append(found)
        self.say(f"{self.kind}: {what} {size:,}")
        return found

    def _checked(self, measure: Callable[[], Any]) -> Any:
        try:
            return measure()
        except RequestFailed as error:
            if not asyncio.run(self.client.listens()):
                raise ServerFailed(f"the server went away: {error}") from error
            raise


def _repeats(length: int) -> int:
    return REPEATS if length <= SHORT else 1
