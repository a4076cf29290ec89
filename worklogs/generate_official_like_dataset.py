"""Makes a dataset of long agent conversations with reusable prefixes, in the shape of the recorded traffic.

    python worklogs/generate_official_like_dataset.py --tokenizer DIR --requests 8 --seed 3 --cap 40K --cumulative
    python worklogs/generate_official_like_dataset.py --tokenizer DIR --requests 881 --seed 0 --cap 256K

writes OUT/synthetic_cumulative_8_s3_cap40k.jsonl (or synthetic_official_...; the format is bench/trace.py's) and its
manifest: SHA-256 of the file, the tokenizer and the template, all settings, and per request the prompt's tokens and
what of them some earlier prompt began with (theoretical_reuse: what an unlimited cache would find). No prompt is longer
than --cap tokens, counted as our server counts them: with its rendering code and template, and the tokenizer (and the
picture settings) of the checkpoint folder.

By default lengths and reuse are those of the recorded traffic, per range of lengths; ranges above the cap become
prompts of 70 to 100 % of it. Other ones: --bucket END:WEIGHT:REUSE for each range. A request goes on with an earlier
prompt, or leaves it behind one of its messages, or begins anew, as its range's share of reuse asks for; so a short
dataset, and one whose cap cuts lengths off, reuses less, and the manifest says what was reached. With --cumulative each
request extends the last one of its conversation (--conversations, taking turns), up to the cap in equal steps, without
pictures or late system messages.

Of the requests, --tools have tool messages, --pictures pictures, --multi-system several or late system messages (sent
as the platform cleans them, or raw: --systems), and --oddities of the bodies and messages have what clients were seen
to send: max_completion_tokens, reasoning_effort, unknown fields, content parts, an index or an object in a call.
Requests that go on with another have its tools, and its oddities in the history.

Every text begins with a tag that is nowhere else. The program proves that no prefix is shared by accident: what a
prompt shares with any earlier one ends where its first new tag stands; for prompts that begin anew that is what the
template itself writes.

One seed makes one dataset. What is made is kept in a .partial file until it is complete; --resume goes on there.
Exit status: 0 made, 1 bad input or a dataset that cannot be made, 2 the command line, 130 interrupted.
"""
import argparse
import bisect
import dataclasses
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_record  # noqa: E402
import replay_trace  # noqa: E402
from bench import jsonl, trace  # noqa: E402
from bench.conversations import OVERHEAD, Message, Texts, cleaned, padded, text_of  # noqa: E402
from bench.progress import Progress  # noqa: E402
from bench.served import Prompt, Served, ServedError  # noqa: E402

VERSION = 1
# How much shorter than wanted a prompt may be, in tokens.
SHORT_BY = 24
# A tag's first digits may be another's, too.
SLACK = 8
# Shares of the recorded traffic: 690, 27 and 34 of 881; and a guess.
TOOLS, PICTURES, MULTI_SYSTEM, ODDITIES = 0.783, 0.031, 0.039, 0.25
MAX_TOKENS = (2048, 4096, 8192, 32000, 65536)
SMALLEST_CAP, LONGEST = 512, 254_336
# What new messages need at least, in tokens, and pictures beside.
ROOM, PICTURE_ROOM = 160, 450
# Where messages leave no room to pad, they are planned to be so much shorter.
SHORTER = (0, 150, 400, 900)
# Parents are looked for among the last so many prompts.
WINDOW = 150


INTERRUPTED = 130


class CannotMake(Exception):
    """One line."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Prompts below `end` tokens: how many of all (weight), and which share of their tokens is reused."""

    end: int
    weight: float
    reuse: float


@dataclasses.dataclass
class Made:
    """A request, and what later ones need to go on with it.

    systems, messages: before cleaning. marks: per place where a later request may leave it, (messages kept, about how
    many tokens these are). tags: of what is new in it.
    """

    length: int
    conversation: str
    turn: int
    tools: list[dict[str, Any]]
    systems: list[Message]
    messages: list[Message]
    marks: list[tuple[int, int]]
    pictures: bool
    multi_system: bool
    extra: dict[str, Any]
    answer: int
    tags: list[str]
    parent: int | None = None
    kept: int = 0


class Generator:
    """Makes requests one after the other; what it makes of the i-th follows from the seed and those before it."""

    def __init__(self, served: Served, options: argparse.Namespace) -> None:
        self.served, self.options = served, options
        self.made: list[Made] = []
        self.prompts: list[Prompt] = []
        self.reuse: list[int] = []
        self.planned: list[int] = []
        self.bodies: list[dict[str, Any]] = []
        self._sorted: list[bytes] = []
        plan = random.Random(f"{options.seed}/plan")
        self.lengths = cumulative_lengths(options) if options.cumulative else official_lengths(options, plan)
        self._phases = [plan.random() for _ in range(3)]
        _, answers = replay_trace.read_shape()
        self._answers = [number for number in answers if number]

    def next(self) -> None:
        """Makes one more.

        Raises:
            CannotMake: it does not come out as it should.
        """
        index = len(self.made)
        texts = Texts(random.Random(f"{self.options.seed}/{index}"))
        made = self._cumulative(index, texts) if self.options.cumulative else self._official(index, texts)
        made, prompt, body = self._fitted(made, texts)
        self.enter(made, prompt, body)

    def enter(self, made: Made, prompt: Prompt, body: dict[str, Any]) -> None:
        """Takes a request that was made, and proves that it shares nothing by accident."""
        index = len(self.made)
        shared = self._shared(prompt.ids)
        places = [place for tag in made.tags if (place := prompt.text.find(tag)) >= 0]
        if not places:
            raise CannotMake(f"request {index}: nothing is new in it")
        planned = self.served.count(prompt.text[:min(places)])
        if made.pictures:
            planned += len(prompt.ids) - self.served.count(prompt.text)
        if shared > planned + SLACK:
            raise CannotMake(f"request {index} shares {shared} tokens with an earlier one, {planned} are planned: an "
                             "accidental prefix")
        self.made.append(made)
        self.prompts.append(Prompt("", []))
        self.planned.append(planned)
        self.reuse.append(min(shared, len(prompt.ids) - 1))
        self.bodies.append(body)

    def _shared(self, ids: list[int]) -> int:
        """The longest common beginning with any earlier prompt. Of sorted texts it is that with a neighbour."""
        key = np.asarray(ids, dtype=">u4").tobytes()
        place = bisect.bisect(self._sorted, key)
        found = max((_common(key, self._sorted[near]) for near in (place - 1, place) if 0 <= near < len(self._sorted)),
                    default=0)
        self._sorted.insert(place, key)
        return found

    def _cumulative(self, index: int, texts: Texts) -> Made:
        before = index - self.options.conversations
        if before < 0:
            return self._begun(index, texts, self._wants(index, 0, self.options.tools))
        return self._continued(index, before, len(self.made[before].messages))

    def _official(self, index: int, texts: Texts) -> Made:
        length = self.lengths[index]
        tools = self._wants(index, 0, self.options.tools)
        pictures = self._wants(index, 1, self.options.pictures)
        multi_system = self._wants(index, 2, self.options.multi_system)
        bucket = bucket_of(length, self.options.buckets)
        inside = [one for one in range(index) if bucket_of(self.lengths[one], self.options.buckets) == bucket]
        owed = self.options.buckets[bucket].reuse * (length + sum(self.made[one].length for one in inside)) - sum(
            self.reuse[one] for one in inside)
        # All or little: so the share is met by the mean, as with real conversations.
        room = length - ROOM - (PICTURE_ROOM if pictures else 0)
        wanted = min(0.97 * length, room) if texts.chance.random() < owed / length else 0.0
        best: tuple[float, int, int] | None = None
        for one in range(max(0, index - WINDOW), index):
            parent = self.made[one]
            if (bool(parent.tools) != tools or (parent.pictures and not pictures)
                    or (parent.multi_system and not multi_system)):
                continue
            for kept, tokens in parent.marks:
                if tokens <= room:
                    distance = abs(tokens - wanted)
                    if best is None or (distance, -one) < (best[0], -best[1]):
                        best = (distance, one, kept)
        if wanted and best is not None and best[0] < wanted:
            made = self._continued(index, best[1], best[2])
        else:
            made = self._begun(index, texts, tools)
        return dataclasses.replace(made, pictures=pictures, multi_system=multi_system)

    def _wants(self, index: int, which: int, share: float) -> bool:
        """True for `share` of all, evenly spread."""
        phase = self._phases[which]
        return int((index + 1) * share + phase) > int(index * share + phase)

    def _begun(self, index: int, texts: Texts, tools: bool) -> Made:
        """A conversation with a system turn of its own."""
        length = self.lengths[index]
        large = length >= 2048
        size = min(replay_trace.SYSTEM_LARGE if large else replay_trace.SYSTEM_SMALL, length * 45 // 100)
        defined: list[dict[str, Any]] = []
        if tools:
            spent = 270         # What the template says about tools.
            while not defined or (spent < size * 6 // 10 and len(defined) < 40):
                defined.append(texts.tool(texts.tag(), 60 if large else 12))
                spent += self.served.count(json.dumps(defined[-1]))
            size -= spent
        systems = [{"role": "system", "content": f"{texts.tag()} {texts.words(max(4, self._words(size)))}"}]
        return Made(length, f"c{index}", 0, defined, systems, [], [], False, False, self._extra(texts),
                    texts.chance.choice(self._answers), [])

    def _continued(self, index: int, parent: int, kept: int) -> Made:
        before = self.made[parent]
        whole = kept == len(before.messages)
        texts = Texts(random.Random(f"{self.options.seed}/{index}/extra"))
        marks = [mark for mark in before.marks if mark[0] <= kept]
        # Only who has it all goes on with the conversation; the others branch off.
        follows = whole and all((one.parent, one.conversation) != (parent, before.conversation) for one in self.made)
        return dataclasses.replace(
            before, length=self.lengths[index], conversation=before.conversation if follows else f"c{index}",
            turn=before.turn + 1 if follows else 0, messages=before.messages[:kept], marks=marks,
            extra=self._extra(texts), answer=texts.chance.choice(self._answers), tags=[], parent=parent, kept=kept)

    def _extra(self, texts: Texts) -> dict[str, Any]:
        """The other fields of the body."""
        chance = texts.chance
        odd = chance.random() < self.options.oddities
        found: dict[str, Any] = {"max_completion_tokens" if odd else "max_tokens": chance.choice(MAX_TOKENS)}
        if chance.random() < self.options.oddities:
            found.update(chance.choice(({"reasoning_effort": "medium"}, {"store": False, "metadata": {"source": "cli"}},
                                        {"service_tier": "auto", "parallel_tool_calls": True},
                                        {"unknown_to_all": {"a": [1]}})))
        return found

    def _words(self, tokens: float) -> int:
        """How many words make so many tokens."""
        return int(tokens / self._per_word)

    @property
    def _per_word(self) -> float:
        if not hasattr(self, "_measured"):
            texts = Texts(random.Random(0))
            self._measured = self.served.count(texts.words(2000)) / 2000
        return self._measured

    def _fitted(self, made: Made, texts: Texts) -> tuple[Made, Prompt, dict[str, Any]]:
        """The request with messages added until it has its length; never more than the cap."""
        for shorter in SHORTER:
            found = self._with_messages(made, texts, made.length - shorter - (PICTURE_ROOM if made.pictures else 0))
            if len(found[1].ids) <= made.length:
                return found
        if len(found[1].ids) > self.options.cap:
            raise CannotMake(f"request {len(self.made)} has {len(found[1].ids)} tokens at least, more than the cap of "
                             f"{self.options.cap}; give a larger --cap, or less --pictures or --tools")
        return found

    def _with_messages(self, made: Made, texts: Texts, most: int) -> tuple[Made, Prompt, dict[str, Any]]:
        """With messages up to about `most` tokens, the last one padded to the request's length."""
        messages, marks = list(made.messages), list(made.marks)
        prompt = self._render(made, messages) if messages else None
        spent = len(prompt.ids) if prompt else self.served.count(
            "".join(text_of(one) for one in made.systems) + json.dumps(made.tools)) + (290 if made.tools else 8)
        if not marks:
            marks.append((0, spent))
        new: list[Message] = []
        if made.multi_system and not any(one["role"] in ("system", "developer") for one in messages):
            new.append({"role": texts.chance.choice(("system", "developer")),
                        "content": f"{texts.tag()} {texts.words(20)}"})
        # Short prompts would be one message otherwise, and have no place where others can leave them.
        texts.longest = max(16, made.length // 8)
        steps = texts.turns(made.tools, bool(messages), self.options.oddities)
        used_tool = not made.tools or any(one["role"] == "tool" for one in messages)
        while True:
            step = next(steps)
            cost = sum(self.served.count(text_of(one)) + OVERHEAD for one in step)
            enough = bool(new) and used_tool and new[-1]["role"] in ("user", "tool")
            if spent + cost > most - SHORT_BY and enough:
                break
            if spent + cost > most - SHORT_BY:
                step = [self._cut(one, texts, max(4, self._words(most - spent - 60) // len(step))) for one in step]
                cost = sum(self.served.count(text_of(one)) + OVERHEAD for one in step)
            new += step
            spent += cost
            used_tool = used_tool or any(one["role"] == "tool" for one in step)
            marks.append((len(messages) + len(new), spent))
        if made.pictures and not any(isinstance(one.get("content"), list) and len(one["content"]) > 1
                                     for one in messages):
            new[-1] = self._with_pictures(new[-1], texts)
        return self._padded(dataclasses.replace(made, messages=messages + new, marks=marks), texts)

    def _cut(self, message: Message, texts: Texts, words: int) -> Message:
        """The message with a text of so many words."""
        if message["content"] is None:
            return message
        text = f"{texts.tag()} {texts.words(words)}"
        parts = isinstance(message["content"], list)
        return {**message, "content": [{"type": "text", "text": text}] if parts else text}

    def _with_pictures(self, message: Message, texts: Texts) -> Message:
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        return {**message, "content": parts + [texts.picture() for _ in range(texts.chance.choice((1, 1, 2, 3)))]}

    def _padded(self, made: Made, texts: Texts) -> tuple[Made, Prompt, dict[str, Any]]:
        """The last message made longer or shorter until the prompt has its length."""
        last = made.messages[-1]
        filler = texts.words(40 + int((made.length + 400) / self._per_word)).split(" ")
        prompt = self._render(made, made.messages)
        low, wanted = 0, self._words(made.length - len(prompt.ids))
        messages = made.messages
        for _ in range(8):
            if made.length - SHORT_BY <= len(prompt.ids) <= made.length:
                break
            low = max(0, min(len(filler), wanted))
            messages = [*made.messages[:-1], padded(last, " ".join(filler[:low]))]
            prompt = self._render(made, messages)
            if not low and len(prompt.ids) > made.length:
                break
            wanted = low + (self._words(made.length - len(prompt.ids) - 4) or -1)
        # Places to leave it, by what the prompt really has.
        scale = len(prompt.ids) / max(1, made.marks[-1][1])
        marks = [(kept, round(tokens * min(1.0, scale))) for kept, tokens in made.marks[:-1]]
        made = dataclasses.replace(made, length=len(prompt.ids), messages=messages,
                                   marks=[*marks, (len(messages), len(prompt.ids))], tags=list(texts.tags))
        return made, prompt, self._body(made, messages)

    def _body(self, made: Made, messages: list[Message]) -> dict[str, Any]:
        sent = [*made.systems, *messages]
        if self.options.systems == "cleaned":
            sent = cleaned(sent)
        body: dict[str, Any] = {"messages": sent, **made.extra}
        if made.tools:
            body["tools"] = made.tools
            body["tool_choice"] = "auto"
        return body

    def _render(self, made: Made, messages: list[Message]) -> Prompt:
        try:
            return self.served.render(self._body(made, messages))
        except ServedError as error:
            raise CannotMake(f"request {len(self.made)}: the server would refuse it: {error}") from error

    def items(self) -> list[trace.Item]:
        """The dataset."""
        chance, now, found = random.Random(f"{self.options.seed}/arrivals"), 0.0, []
        for index, (made, body, reuse) in enumerate(zip(self.made, self.bodies, self.reuse, strict=True)):
            found.append(trace.Item(index, body, made.conversation, made.turn, made.length, reuse, made.answer,
                                    None if self.options.rate is None else round(now, 3)))
            if self.options.rate is not None:
                now += chance.expovariate(self.options.rate)
        return found


def _common(one: bytes, other: bytes) -> int:
    """Tokens."""
    length = min(len(one), len(other)) // 4
    equal = np.frombuffer(one, dtype=">u4", count=length) == np.frombuffer(other, dtype=">u4", count=length)
    return length if equal.all() else int(equal.argmin())


def bucket_of(length: int, buckets: list[Bucket]) -> int:
    """Index; the last one takes what is longer than all."""
    return next((index for index, bucket in enumerate(buckets) if length < bucket.end), len(buckets) - 1)


def official_lengths(options: argparse.Namespace, chance: random.Random) -> list[int]:
    """A length per request: ranges by their weights (largest remainders), lengths within them as recorded."""
    known = [length for length in replay_trace.read_shape()[0] if length is not None]
    total = sum(bucket.weight for bucket in options.buckets)
    exact = [options.requests * bucket.weight / total for bucket in options.buckets]
    counts = [int(number) for number in exact]
    for index in sorted(range(len(exact)), key=lambda one: counts[one] - exact[one])[:options.requests - sum(counts)]:
        counts[index] += 1
    lengths, low = [], 0
    for count, bucket in zip(counts, options.buckets, strict=True):
        high = min(bucket.end, max(low + 1, LONGEST + 1))
        inside = [length for length in known if low <= length < high] or list(range(max(low, high * 3 // 4), high))
        lengths += [chance.choice(inside) for _ in range(count)]
        low = bucket.end
    chance.shuffle(lengths)
    return [length if length <= options.cap else int(options.cap * chance.uniform(0.7, 1.0))
            for length in (max(SMALLEST_CAP, length) for length in lengths)]


def cumulative_lengths(options: argparse.Namespace) -> list[int]:
    """Each conversation grows to the cap in equal steps."""
    steps = -(-options.requests // options.conversations)
    return [max(SMALLEST_CAP, options.cap * (index // options.conversations + 1) // steps)
            for index in range(options.requests)]


def manifest_of(generator: Generator, items: list[trace.Item], digest: str, name: str) -> dict[str, Any]:
    """What stands beside the dataset."""
    options = generator.options
    rows = []
    for index, bucket in enumerate(options.buckets):
        inside = [item for item in items if bucket_of(item.expected_prompt_tokens or 0, options.buckets) == index]
        tokens = sum(item.expected_prompt_tokens or 0 for item in inside)
        reused = sum(item.theoretical_reuse or 0 for item in inside)
        rows.append({"below": bucket.end, "requests": len(inside), "tokens": tokens,
                     "reuse_wanted": None if options.cumulative else bucket.reuse,
                     "reuse": round(reused / tokens, 4) if tokens else None})
    total = sum(item.expected_prompt_tokens or 0 for item in items)
    anew = [index for index, made in enumerate(generator.made) if made.parent is None]
    return {
        "name": name, "sha256": digest, "requests": len(items), "seed": options.seed, "cap": options.cap,
        "generator": VERSION, "settings": settings_of(options), **generator.served.digests,
        "tokens": total, "longest": max(item.expected_prompt_tokens or 0 for item in items),
        "reuse": round(sum(item.theoretical_reuse or 0 for item in items) / total, 4),
        "shares": {"tools": _share(items, lambda body: any(one["role"] == "tool" for one in body["messages"])),
                   "pictures": _share(items, lambda body: "data:image" in json.dumps(body["messages"])),
                   "multi_system": round(sum(made.multi_system for made in generator.made) / len(items), 4)},
        "buckets": rows,
        "no_accidental_prefixes": {
            "proved": "what a prompt shares with any earlier one ends where its first new tag stands",
            "begin_anew": len(anew), "most_shared_by_those": max((generator.reuse[index] for index in anew), default=0),
            "most_beyond_plan": max(shared - planned for shared, planned in
                                    zip(generator.reuse, generator.planned, strict=True)), "limit": SLACK},
        "per_request": [{"expected_prompt_tokens": item.expected_prompt_tokens,
                         "theoretical_reuse": item.theoretical_reuse, "conversation": item.conversation,
                         "turn": item.turn, "parent": made.parent,
                         "sha256": hashlib.sha256(item.line().encode()).hexdigest()[:16]}
                        for item, made in zip(items, generator.made, strict=True)]}


def _share(items: list[trace.Item], has: Any) -> float:
    return round(sum(bool(has(item.body)) for item in items) / len(items), 4)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What decides about the dataset."""
    return {**{name: getattr(options, name) for name in (
        "requests", "seed", "cap", "cumulative", "conversations", "tools", "pictures", "multi_system", "oddities",
        "systems", "rate")}, "buckets": [dataclasses.astuple(bucket) for bucket in options.buckets]}


def size(argument: str) -> int:
    """Tokens: a number, or thousands (40K = 40,960)."""
    number, factor = (argument[:-1], 1024) if argument[-1:] in ("k", "K") else (argument, 1)
    if not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"{argument!r} is no number of tokens, as 40960 or 40K")
    return int(number) * factor


def bucket(argument: str) -> Bucket:
    """END:WEIGHT:REUSE."""
    try:
        end, weight, reuse = argument.split(":")
        found = Bucket(size(end), float(weight), float(reuse))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"{argument!r} is not END:WEIGHT:REUSE, as 8K:219:0.89") from error
    if not 0 < found.weight < float("inf") or not 0 <= found.reuse < 1:
        raise argparse.ArgumentTypeError(f"{argument!r}: the weight is above 0, the reuse from 0 to below 1")
    return found


def share(argument: str) -> float:
    """From 0 to 1."""
    try:
        value = float(argument)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{argument!r} is no share from 0 to 1")
    return value


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="the served checkpoint's folder")
    parser.add_argument("--requests", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--cap", type=size, default=size("40K"), help="tokens of a prompt at most (default: 40K)")
    parser.add_argument("--cumulative", action="store_true", help="each request extends the last")
    parser.add_argument("--conversations", type=int, default=1, help="of --cumulative, taking turns (default: 1)")
    parser.add_argument("--bucket", type=bucket, action="append", metavar="END:WEIGHT:REUSE", dest="buckets",
                        help="lengths; may be repeated, ascending")
    parser.add_argument("--tools", type=share, default=TOOLS, help="share of requests (default: %(default)s)")
    parser.add_argument("--pictures", type=share, help=f"default: {PICTURES}, and 0 with --cumulative")
    parser.add_argument("--multi-system", type=share, help=f"default: {MULTI_SYSTEM}, and 0 with --cumulative")
    parser.add_argument("--systems", choices=("cleaned", "raw"), default="cleaned",
                        help="several system messages: as the platform sends them, or as clients do")
    parser.add_argument("--oddities", type=share, default=ODDITIES, help="default: %(default)s")
    parser.add_argument("--rate", type=float, help="requests a second: gives every request an arrival_s")
    parser.add_argument("--out", type=Path, default=bench_record.ROOT / ".cache/datasets", help="folder")
    parser.add_argument("--resume", action="store_true", help="go on with an unfinished dataset")
    parser.add_argument("--no-progress", action="store_true")
    options = parser.parse_args(arguments)
    if options.requests < 1 or not 1 <= options.conversations <= options.requests:
        parser.error("--requests and --conversations are at least 1, and there are no more conversations than requests")
    if options.cap < SMALLEST_CAP:
        parser.error(f"--cap is at least {SMALLEST_CAP}")
    for name, usual in (("pictures", PICTURES), ("multi_system", MULTI_SYSTEM)):
        given = getattr(options, name)
        if given and options.cumulative:
            parser.error(f"--{name.replace('_', '-')}: what each request of --cumulative adds has none")
        if given is None:
            setattr(options, name, 0.0 if options.cumulative else usual)
    if options.rate is not None and not 0 < options.rate < float("inf"):
        parser.error("--rate is above 0, and a number")
    options.buckets = options.buckets or [Bucket(*row) for row in replay_trace.BUCKETS]
    if [one.end for one in options.buckets] != sorted({one.end for one in options.buckets}):
        parser.error("--bucket: ends ascend")
    return options


def name_of(options: argparse.Namespace) -> str:
    """The file's, as the predecessor's were called."""
    cap = f"{options.cap // 1024}k" if options.cap % 1024 == 0 else str(options.cap)
    kind = "cumulative" if options.cumulative else "official"
    return f"synthetic_{kind}_{options.requests}_s{options.seed}_cap{cap}"


def make(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Writes dataset and manifest.

    Raises:
        CannotMake: bad input, or it does not come out.
    """
    try:
        served = Served(options.tokenizer)
    except ServedError as error:
        raise CannotMake(str(error)) from error
    if options.pictures and not served.takes_pictures:
        raise CannotMake(f"{options.tokenizer}: its configuration takes no pictures; give --pictures 0")
    generator = Generator(served, options)
    name = name_of(options)
    path = options.out / f"{name}.jsonl"
    partial = options.out / f"{name}.partial"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.resume and not partial.exists():
            raise CannotMake(f"nothing to resume: {partial} is not there")
        with jsonl.hold(partial):
            return _made(generator, served, options, path, partial)
    except jsonl.Held as error:
        raise CannotMake(str(error)) from error
    except OSError as error:
        raise CannotMake(f"--out {options.out}: no file can be written there: {error.strerror or error}") from error


def _made(generator: Generator, served: Served, options: argparse.Namespace, path: Path,
          partial: Path) -> tuple[Path, dict[str, Any]]:
    key = json.dumps({"settings": settings_of(options), "generator": VERSION, **served.digests})
    kept = _kept(partial, key) if options.resume else []
    if not options.resume:
        partial.write_text(key + "\n", encoding="utf-8")
    progress = Progress(options.requests, not options.no_progress, len(kept))
    try:
        for made in kept:
            body = generator._body(made, made.messages)
            generator.enter(made, served.render(body), body)
        while len(generator.made) < options.requests:
            generator.next()
            jsonl.add(partial, dataclasses.asdict(generator.made[-1]))
            progress.show(len(generator.made), f"{sum(made.length for made in generator.made):,} tokens")
    finally:
        progress.close()
        served.close()
    items = generator.items()
    digest = trace.write(path, items)
    manifest = manifest_of(generator, items, digest, path.name)
    trace.manifest_path(path).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    partial.unlink()
    return path, manifest


def _kept(partial: Path, key: str) -> list[Made]:
    try:
        first, *lines = jsonl.read(partial) or [None]
        made = [Made(**{**fields, "marks": [tuple(mark) for mark in fields["marks"]]}) for fields in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise CannotMake(f"{partial} is no unfinished dataset ({type(error).__name__}: {error}); make it without "
                         "--resume") from error
    if json.dumps(first) != key:
        raise CannotMake(f"{partial} is of other settings, another tokenizer or template; make it without --resume")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    try:
        path, manifest = make(options)
    except KeyboardInterrupt:
        print("generate_official_like_dataset: interrupted; --resume goes on if a .partial file is there",
              file=sys.stderr)
        return INTERRUPTED
    except (CannotMake, OSError, ValueError) as error:
        print(f"generate_official_like_dataset: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {manifest['requests']} requests, {manifest['tokens']:,} tokens, the longest prompt "
          f"{manifest['longest']:,}; {manifest['reuse']:.1%} reusable")
    for row in manifest["buckets"]:
        if row["requests"]:
            wanted = "" if row["reuse_wanted"] is None else f" (wanted {row['reuse_wanted']:.0%})"
            print(f"  below {row['below'] / 1024:g}K: {row['requests']} requests, "
                  f"{row['reuse']:.1%} reusable{wanted}")
    proof = manifest["no_accidental_prefixes"]
    print(f"  no accidental prefixes: {proof['begin_anew']} prompts begin anew and share at most "
          f"{proof['most_shared_by_those']} tokens with any other")
    return 0


if __name__ == "__main__":
    sys.exit(main())
