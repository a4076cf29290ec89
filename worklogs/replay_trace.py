"""A synthetic trace with the shape of the recorded traffic: 881 prompts, their lengths, and what they share.

Known are the lengths of 659 of the 881 prompts in their order and some answers' lengths (replay_shape.csv, `seq`,
`prompt_tok`, `out_tok_run1..3`), and, per range of lengths, how many prompts there are and which share of their tokens
an earlier prompt had already (BUCKETS). Unknown are the texts, so the structure below is made up, from one seed, such
that it meets these figures. What is assumed:

* Unknown lengths are drawn from the known ones of the same range, so that the ranges have their counts.
* A prompt is a system turn (with tools) and messages; message lengths are log-normal (median 250, mean 580 tokens).
* A prompt that is a little longer than one shortly before it is taken for that conversation's next turn (the recorded
  lengths show such interleaved, growing chains by themselves). EXTENDING of all prompts contain an earlier one whole
  (so there are 881 - 113 = 768 threads); the other next turns leave it some messages before its end, as they do when
  thoughts are dropped after a user's turn or a client rewrites the end of its history. `inside` is the share of the
  latter that leave it in the middle of a message.
* Other prompts share the system turn of a tool (7,100 tokens, which the most frequent lengths suggest; 340 for those
  below 2,048) or nothing. How many do which is chosen per range so that the range's share is met.
* Histories hold recorded answers, not those of the server that replays them (`answers="recorded"`); with "ours" a
  prompt that contains an earlier one contains that one's answer, too, as it is with a live agent.
"""
import csv
import dataclasses
import random
from pathlib import Path

import numpy as np

BLOCK = 16
SHAPE = Path(__file__).resolve().parent / "replay_shape.csv"
# Upper end of the range (exclusive), prompts, share of tokens that an earlier prompt had.
BUCKETS = ((2048, 95, 0.33), (4096, 1, 0.01), (8192, 219, 0.89), (16384, 222, 0.58), (32768, 115, 0.60),
           (65536, 110, 0.66), (131072, 114, 0.69), (1 << 30, 5, 0.23))
EXTENDING = 113
SYSTEM_LARGE, SYSTEM_SMALL = 7100, 340
# Whatever message follows, it begins with "<|im_start|>", and often the same role: tokens shared behind a boundary.
TURN_START = 3
# How far back a conversation's last prompt may lie; what a turn may add: tokens, and a share of the prompt.
WINDOW, GROWTH, RELATIVE_GROWTH = 150, 800, 0.06
# Next turns that do not contain the last prompt leave it before this share of it, on average.
REWRITTEN = 0.06


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of the trace. Lengths and positions in tokens.

    keys: int64 [length // BLOCK], one number per full block; two prompts share a prefix of k blocks if and only if
        their first k numbers are equal.
    answer_keys: the same for the blocks that its answer completes.
    boundaries: ascending ends of its messages, the first that of its system turn, the last one `length` less the start
        of the answer.
    shared: tokens that the prompt `parent` (index, -1 for none) begins with, too.
    """

    index: int
    length: int
    answer: int
    keys: np.ndarray
    answer_keys: np.ndarray
    boundaries: tuple[int, ...]
    parent: int
    shared: int


def bucket_of(length: int) -> int:
    """Index into BUCKETS."""
    return next(index for index, (end, _, _) in enumerate(BUCKETS) if length < end)


def read_shape(path: Path = SHAPE) -> tuple[list[int | None], list[int | None]]:
    """Prompt lengths and answer lengths (the mean of what is known) in order; None where never seen.

    Raises:
        ValueError: a line that does not parse, with its number.
    """
    prompts: list[int | None] = []
    answers: list[int | None] = []
    with open(path, encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                seen = [int(row[f"out_tok_run{run}"]) for run in (1, 2, 3) if row[f"out_tok_run{run}"]]
                prompts.append(int(row["prompt_tok"]) if row["prompt_tok"] else None)
            except (KeyError, ValueError, TypeError) as error:
                raise ValueError(f"{path}: line {number} does not parse: {error!r}") from error
            answers.append(round(sum(seen) / len(seen)) if seen else None)
    return prompts, answers


def build(seed: int = 0, *, count: int | None = None, inside: float = 0.1, answers: str = "recorded",
          path: Path = SHAPE) -> list[Request]:
    """The trace; the first `count` requests of it where given.

    Args:
        inside: share of the rewritten next turns that leave the last prompt in the middle of a message.
        answers: "recorded" or "ours" (see above).

    Raises:
        ValueError: a range's share of reuse cannot be met, or the file does not parse.
    """
    if answers not in ("recorded", "ours"):
        raise ValueError(f"answers {answers!r} is neither 'recorded' nor 'ours'")
    chance = random.Random(seed)
    known, known_answers = read_shape(path)
    lengths = _fill_lengths(known, chance)
    seen = [value for value in known_answers if value]
    outputs = [value or chance.choice(seen) for value in known_answers]
    parents, shares = _share(lengths, chance)
    requests = _requests(lengths, outputs, parents, shares, chance, inside, answers)
    return requests[:count]


def reusable(requests: list[Request]) -> list[int]:
    """Per request, the tokens of whole blocks that an earlier request's prompt began with: what an unlimited cache of
    prompts would find."""
    known: set[int] = set()
    found = []
    for request in requests:
        keys = request.keys.tolist()
        usable = (request.length - 1) // BLOCK
        hit = next((block for block in range(usable) if keys[block] not in known), usable)
        found.append(hit * BLOCK)
        known.update(keys)
    return found


def _fill_lengths(known: list[int | None], chance: random.Random) -> list[int]:
    """Known lengths, the others drawn so that every range has its count, as far as the known ones leave room."""
    by_bucket: list[list[int]] = [[] for _ in BUCKETS]
    for length in known:
        if length is not None:
            by_bucket[bucket_of(length)].append(length)
    missing = sum(length is None for length in known)
    drawn: list[int] = []
    for lengths, (end, wanted, _) in zip(by_bucket, BUCKETS, strict=True):
        drawn += [min(end - 1, chance.choice(lengths) + chance.randrange(8))
                  for _ in range(max(0, wanted - len(lengths)))]
    chance.shuffle(drawn)
    drawn = drawn[:missing]
    return [length if length is not None else drawn.pop() for length in known]


def _share(lengths: list[int], chance: random.Random) -> tuple[list[int], list[str]]:
    """Parent and kind per request: "whole" (contains its parent), "rewritten", "system" (parent -1) or "new"."""
    parents = _next_turns(lengths)
    kinds = ["new"] * len(lengths)
    members: list[list[int]] = [[] for _ in BUCKETS]
    for index, length in enumerate(lengths):
        members[bucket_of(length)].append(index)
    continuing = [index for index, parent in enumerate(parents) if parent >= 0 and lengths[index] >= 8192]
    for index in chance.sample(continuing, EXTENDING):
        kinds[index] = "whole"
    for (end, _, share), group in zip(BUCKETS, members, strict=True):
        target = share * sum(lengths[index] for index in group)
        total = sum(float(lengths[parents[index]]) for index in group if kinds[index] == "whole")
        order = group[:]
        chance.shuffle(order)
        for index in order:
            system = _system(lengths[index])
            if kinds[index] == "new" and system and total + system <= target:
                kinds[index] = "system"
                total += system
        for index in order:
            # Short prompts have little beside their system turn.
            if kinds[index] != "system" or parents[index] < 0 or lengths[index] < 8192:
                continue
            gain = lengths[parents[index]] * (1 - REWRITTEN) - _system(lengths[index])
            if gain > 0 and total + gain <= target:
                kinds[index] = "rewritten"
                total += gain
        reached = total / max(1, sum(lengths[index] for index in group))
        if share > 0.1 and abs(reached - share) > 0.1:
            raise ValueError(f"prompts below {end} tokens: {reached:.2f} of their tokens repeat, not {share}")
    return parents, kinds


def _next_turns(lengths: list[int]) -> list[int]:
    """Per request the one that it continues, -1 for none: of those shortly before it that are a little shorter and were
    not continued yet, the longest."""
    parents = [-1] * len(lengths)
    continued: set[int] = set()
    for index, length in enumerate(lengths):
        candidates = [before for before in range(max(0, index - WINDOW), index) if before not in continued
                      and BLOCK < length - lengths[before] <= GROWTH + RELATIVE_GROWTH * length]
        if candidates:
            parents[index] = max(candidates, key=lambda before: (lengths[before], before))
            continued.add(parents[index])
    return parents


def _system(length: int) -> int:
    """Tokens of the system turn that prompts of this length share; 0 where they share none."""
    if length > SYSTEM_LARGE + 2 * BLOCK:
        return SYSTEM_LARGE
    return SYSTEM_SMALL if SYSTEM_SMALL + BLOCK < length < 2048 else 0


def _requests(lengths: list[int], outputs: list[int], parents: list[int], kinds: list[str], chance: random.Random,
              inside: float, answers: str) -> list[Request]:
    counter = iter(range(1, 1 << 40))

    def fresh(blocks: int) -> np.ndarray:
        return np.fromiter((next(counter) for _ in range(max(0, blocks))), np.int64)

    systems = {size: fresh(size // BLOCK + 1) for size in (SYSTEM_LARGE, SYSTEM_SMALL)}
    requests: list[Request] = []
    for index, (length, output, parent, kind) in enumerate(zip(lengths, outputs, parents, kinds, strict=True)):
        if kind == "system":
            parent, start = -1, _system(length)
            shared, beginning, boundaries = start + TURN_START, systems[start], [start]
        elif kind == "new":
            parent, shared, beginning = -1, 0, fresh(0)
            boundaries = [min(length // 2, round(chance.lognormvariate(6.5, 1.0)))]
        else:
            before = requests[parent]
            shared, beginning = before.length - 1, before.keys
            if kind == "whole" and answers == "ours":
                shared = min(length - 2 * BLOCK, before.length + before.answer)
                beginning = np.concatenate([before.keys, before.answer_keys])
            if kind == "rewritten":
                shared = _leave(before, chance, inside)
            boundaries = [place for place in before.boundaries if place <= shared]
        shared = min(shared, length - 1)
        kept = beginning[:shared // BLOCK]
        keys = np.concatenate([kept, fresh(length // BLOCK - len(kept))])
        end = length - TURN_START - 2
        while True:
            place = (boundaries[-1] if boundaries else 0) + max(8, round(chance.lognormvariate(5.52, 1.3)))
            if place >= end:
                break
            boundaries.append(place)
        boundaries.append(end)
        requests.append(Request(index, length, output, keys,
                                fresh((length + output) // BLOCK - length // BLOCK),
                                tuple(sorted({place for place in boundaries if 0 < place < length})), parent, shared))
    return requests


def _leave(before: Request, chance: random.Random, inside: float) -> int:
    """Tokens of `before` that a rewritten next turn keeps."""
    depth = before.length * (1 - min(0.6, chance.expovariate(1 / REWRITTEN)))
    if chance.random() < inside:
        return max(1, int(depth))
    place = min(before.boundaries, key=lambda boundary: abs(boundary - depth))
    return min(place + TURN_START, before.length - 1)
