"""How well does a served model recall what stands somewhere in a long text? By length and depth, as a picture.

    python worklogs/needle_recall.py --base-url http://127.0.0.1:8000 [--model llm] [--keep ours] [--picture FILE.svg]
    python worklogs/needle_recall.py --draw remote_results/RECORD.json --picture FILE.svg

A text is sentences that have nothing to do with anything, and at each depth a needle: "The code of Anna is RIVER-4821."
Each needle is asked for by a request of its own, greedy; the others are distractors, and all but the first of these
requests find the text in the server's prefix cache. An answer is right if it holds the asked code and no other one.
Any server with /v1/chat/completions will do; lengths are tokens as it counts them. Exit status: 0 measured, 1 something
was not answered.
"""

# Lists of words read better in one piece.
# ruff: noqa: SIM905
from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import openai
from openai.types.chat import ChatCompletion

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_record  # noqa: E402
import heat_map  # noqa: E402
import server_url  # noqa: E402

LENGTHS, DEPTHS = (250, 500, 1000, 2000, 4000, 8000), (0, 25, 50, 75, 100)
OWNERS = "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam Uma Victor".split()
WORDS = "APPLE BRIDGE CANDLE DRUM FENCE GARDEN HAMMER ISLAND JACKET KETTLE LADDER MIRROR RIVER STONE TOWER".split()
SENTENCES = ("{owner} put the {thing} on the table.", "The {thing} lies near the {place}.",
             "{owner} went to the {place} with a {thing}.", "It is {number} steps from the {place} to the market.",
             "There are {number} chairs in the {place}.", "{owner} likes the old {thing}.")
THINGS = "lamp chair letter basket pencil blanket bottle violin button carpet helmet needle spoon wheel clock".split()
PLACES = "forest village harbor mountain meadow castle valley desert lake station library".split()
# Answers are as long as a code and a few words.
ANSWER = 60


class NotMeasured(Exception):
    """The server did not answer as it should; one line."""


@dataclass
class Sample:
    """One needle that was asked for. length: as wanted; prompt: tokens by the server's word; cached: those of them that
    it had, None where it does not say."""

    length: int
    document: int
    depth: int
    verdict: str
    answer: str
    prompt: int
    cached: int | None


def filler(rng: random.Random, words: int) -> list[str]:
    """Sentences of about so many words in all."""
    out: list[str] = []
    while words > 0:
        out.append(rng.choice(SENTENCES).format(owner=rng.choice(OWNERS), thing=rng.choice(THINGS),
                                                place=rng.choice(PLACES), number=rng.randint(2, 99)))
        words -= len(out[-1].split())
    return out


@dataclass
class Document:
    """needles: depth in percent -> (owner, code)."""

    text: str
    needles: dict[int, tuple[str, str]]

    def question(self, depth: int) -> str:
        return f"{self.text}\n\nWhat is the code of {self.needles[depth][0]}? Only the code."

    def verdict(self, depth: int, answer: str) -> str:
        """right, another (a needle's code that was not asked for, alone or beside the right one), wrong."""
        # A longer number that begins with the asked one is another number.
        found = {place for place, (_, code) in self.needles.items() if re.search(rf"(?<!\w){code}(?!\d)", answer)}
        return "right" if found == {depth} else "another" if found else "wrong"


def document(seed: str, words: int, depths: tuple[int, ...]) -> Document:
    """Sentences of so many words, and a needle at each depth; the same every time."""
    rng = random.Random(seed)
    sentences = filler(rng, words)
    owners, kinds = rng.sample(OWNERS, len(depths)), rng.sample(WORDS, len(depths))
    needles = {depth: (owner, f"{kind}-{rng.randint(1000, 9999)}")
               for depth, owner, kind in zip(depths, owners, kinds, strict=True)}
    count = len(sentences)
    for depth in sorted(depths, reverse=True):
        owner, code = needles[depth]
        sentences.insert(round(count * depth / 100), f"The code of {owner} is {code}.")
    return Document(" ".join(sentences), needles)


class Server:
    """What is asked. thinking: whether the model is told to think first."""

    def __init__(self, client: openai.OpenAI, model: str, thinking: bool) -> None:
        self.client, self.model, self.thinking = client, model, thinking

    def ask(self, text: str, most: int = ANSWER) -> tuple[str, int, int | None]:
        """(answer, tokens of the prompt, cached ones). Raises NotMeasured."""
        try:
            got = self.client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=most,
                extra_body={"chat_template_kwargs": {"enable_thinking": self.thinking}})
        except (openai.OpenAIError, ValueError) as error:
            raise NotMeasured(f"{type(error).__name__}: {error}") from error
        if not isinstance(got, ChatCompletion) or got.usage is None or not got.choices:
            raise NotMeasured(f"an answer without usage or choices: {got!r:.300}")
        details = got.usage.prompt_tokens_details
        return got.choices[0].message.content or "", got.usage.prompt_tokens, details.cached_tokens if details else None


def version(base: str) -> str:
    """What a server says of itself at /version, or nothing."""
    try:
        with urllib.request.urlopen(f"{base}/version", timeout=60) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return ""
    return str(found.get("version", "")) if isinstance(found, dict) else ""


def words_of(server: Server, lengths: tuple[int, ...], depths: tuple[int, ...]) -> dict[int, int]:
    """Length in tokens -> words of filler that make such a prompt with needles and question, by two trials.

    Raises NotMeasured: a length is too short for the needles, or the server counts no tokens.
    """
    few, many = 40, 400
    sizes = [server.ask(document("size", words, depths).question(depths[0]), most=1)[1] for words in (few, many)]
    rate = (sizes[1] - sizes[0]) / (many - few)
    if rate <= 0:
        raise NotMeasured(f"usage.prompt_tokens does not grow with the prompt: {sizes[0]}, then {sizes[1]}")
    out = {length: round(few + (length - sizes[0]) / rate) for length in lengths}
    for length, words in out.items():
        if words < len(depths):
            raise NotMeasured(f"{length} tokens are too few for {len(depths)} needles and their question")
    return out


def measure(server: Server, lengths: tuple[int, ...], depths: tuple[int, ...], documents: int, seed: int,
            ) -> Iterator[Sample]:
    """Every needle of every text, the shortest texts first."""
    words = words_of(server, lengths, depths)
    for length in lengths:
        for number in range(documents):
            text = document(f"{seed} {length} {number}", words[length], depths)
            for depth in depths:
                answer, prompt, cached = server.ask(text.question(depth), ANSWER * (8 if server.thinking else 1))
                yield Sample(length, number, depth, text.verdict(depth, answer), answer[:200], prompt, cached)


def table(samples: list[Sample]) -> list[dict[str, Any]]:
    """One row per length and depth: how many were right, how many gave another needle."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for one in samples:
        row = rows.setdefault((one.length, one.depth), {"length": one.length, "depth": one.depth, "tokens": 0,
                                                        "asked": 0, "right": 0, "another": 0})
        row["asked"] += 1
        row["tokens"] = max(row["tokens"], one.prompt)
        if one.verdict in row:
            row[one.verdict] += 1
    return list(rows.values())


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(f"{row['length']:6} tokens, depth {row['depth']:3} %: {row['right']} of {row['asked']} right, "
              f"{row['another']} another")


def picture(record: dict[str, Any]) -> str:
    """The SVG of a record."""
    rows = {(row["length"], row["depth"]): (row["right"], row["asked"]) for row in record["table"]}
    lengths, depths = (list(dict.fromkeys(key[part] for key in rows)) for part in (0, 1))
    by = " ".join(filter(None, (record["server"], record["version"])))
    title = f"Needles recalled: {record['model']}" + (f" ({by})" if by else "")
    return heat_map.svg(title, "tokens of the prompt", "depth", [f"{length:,}" for length in lengths],
                        [f"{depth} %" for depth in depths],
                        [[rows.get((length, depth)) for length in lengths] for depth in depths])


def numbers(text: str) -> tuple[int, ...]:
    """Different numbers, in order. Raises argparse.ArgumentTypeError."""
    try:
        found = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 0,50,100")
    return found


def depths_of(text: str) -> tuple[int, ...]:
    found = numbers(text)
    if found[-1] > 100 or len(found) > len(WORDS):
        raise argparse.ArgumentTypeError(f"{text!r}: depths are at most {len(WORDS)} percentages from 0 to 100")
    return found


def above_0(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def drawn(record: Path) -> str:
    """The SVG of a record's file. Raises ValueError where it is none."""
    try:
        return picture(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--draw {record} is no record of this program: {type(error).__name__}: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", type=server_url.base, default="http://127.0.0.1:8000", help="with or without /v1")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--lengths", type=numbers, default=LENGTHS, metavar="N,...", help="tokens of the prompts")
    parser.add_argument("--depths", type=depths_of, default=DEPTHS, metavar="N,...", help="percent of the text")
    parser.add_argument("--documents", type=above_0, default=10, help="texts of each length (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--thinking", action="store_true", help="let the model think first")
    parser.add_argument("--keep", choices=["ours", "vllm", "llama"], help="kind of the server: keep a record")
    parser.add_argument("--title", default="", help="of the model, in record and picture; default: its name")
    parser.add_argument("--server-command", default="", help="how it was started; kept without paths")
    parser.add_argument("--out", type=Path, default=bench_record.RESULTS, help="folder of the record")
    parser.add_argument("--picture", type=Path, help="SVG file to write")
    parser.add_argument("--draw", type=Path, metavar="RECORD", help="only draw the picture of a record")
    options = parser.parse_args(arguments)
    # What cannot be written is told of before hours are spent on it.
    for folder in ([options.picture.parent] if options.picture else []) + ([options.out] if options.keep else []):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"{folder} can be no folder: {error.strerror}")
    if options.draw:
        if not options.picture:
            parser.error("--draw needs --picture")
        try:
            options.picture.write_text(drawn(options.draw), encoding="utf-8")
        except ValueError as error:
            parser.error(str(error))
        return 0
    base = options.base_url
    client = openai.OpenAI(base_url=f"{base}/v1", api_key=os.environ.get("VLLM_API_KEY", "none"), max_retries=0,
                           timeout=1800)
    server, samples = Server(client, options.model, options.thinking), list[Sample]()
    total = len(options.lengths) * len(options.depths) * options.documents
    try:
        for sample in measure(server, options.lengths, options.depths, options.documents, options.seed):
            samples.append(sample)
            right = sum(one.verdict == "right" for one in samples)
            print(f"\r{len(samples)} of {total}, {sample.length} tokens: {right} right", end="", file=sys.stderr)
    except NotMeasured as error:
        show(table(samples))
        print(f"\nneedle_recall: {error}", file=sys.stderr)
        return 1
    print(file=sys.stderr)
    words = ["needle_recall.py", *(sys.argv[1:] if arguments is None else arguments)]
    record = {"kind": "needle-recall", "server": options.keep or "", "version": version(base),
              "model": options.title or options.model, **bench_record.commit(), "machine": bench_record.machine(),
              "command": bench_record.without_paths(words),
              "server_command": bench_record.without_paths(options.server_command.split()),
              "thinking": options.thinking, "table": table(samples), "samples": [asdict(one) for one in samples]}
    show(record["table"])
    if options.keep:
        print(f"kept as {bench_record.keep(f'needle-recall-{options.keep}', record, options.out).name}")
    if options.picture:
        options.picture.write_text(picture(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
