"""The requests of a formal run, as the model of engine and cache takes them.

What prompts share, and where their messages end, comes from the dataset, rendered as our server renders it. Without the
dataset it is what the record holds: how much of a prompt some earlier one had (theoretical_reuse), and for the ends of
messages only those that follow from the prompts before, which is less than the server knows. Nothing of a prompt's
treatment follows from what comes after it, and nothing from how the measured run went, but the answers' lengths.
"""
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench import trace
from bench.served import Served, ServedError
from replay_trace import BLOCK, TURN_START, Request

# Between the end of the last message and the prompt's: the start of the answer's turn.
LAST_TURN = TURN_START + 2


class RequestsError(Exception):
    """The record does not say what is needed; one line."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """ids: of the prompt. boundaries: ascending ends of messages, in tokens."""

    ids: Sequence[int]
    boundaries: tuple[int, ...]


class Renderer(Served):
    """Prompts of a checkpoint folder, with the ends of messages, which the server hands to its prefix cache."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._renderer._find_boundaries = True

    def rendered(self, body: dict[str, Any]) -> Rendered:
        """Raises:
            ServedError: the server would refuse it.
        """
        try:
            request = self._normalise.normalise_chat({"model": "llm", **body})
            measured = self._loop.run_until_complete(self._reader.measured(request.pictures))
            prompt = self._loop.run_until_complete(
                self._renderer.chat(request, [picture.tokens for picture in measured]))
        except self._error as error:
            raise ServedError(str(error)) from error
        return Rendered(prompt.token_ids, prompt.boundaries)


def rendered_of(record: dict[str, Any], dataset: Path, folder: Path,
                repeats: Sequence[dict[str, Any]] = ()) -> dict[int, Rendered]:
    """Prompts by index, of the dataset that the run used. repeats: of it, for which they must be right, too.

    Raises:
        RequestsError: it is another dataset, or the tokenizer is not the server's.
    """
    found = trace.read(dataset)
    if found.sha256 != record["dataset"]["sha256"]:
        raise RequestsError(f"{dataset}: not the dataset of the run, {record['dataset']['name']} (another SHA-256)")
    lengths: dict[int, set[int]] = {}
    for sample in itertools.chain.from_iterable(one["samples"] for one in (record, *repeats)):
        lengths.setdefault(sample["index"], set()).update({sample["prompt_tokens"]} - {None})
    renderer, prompts = Renderer(folder), {}
    try:
        for item in found.items:
            if item.index not in lengths:
                continue
            prompt = prompts[item.index] = renderer.rendered({**item.body, **(record.get("set") or {})})
            if others := lengths[item.index] - {len(prompt.ids)}:
                raise RequestsError(f"request {item.index} renders to {len(prompt.ids)} tokens, the server had "
                                    f"{min(others)}: {folder} has not the server's tokenizer")
    finally:
        renderer.close()
    return prompts


def requests_of(record: dict[str, Any], prompts: dict[int, Rendered] | None = None) -> list[Request]:
    """The requests that succeeded, in the order in which they are sent. prompts: of `rendered_of`.

    Raises:
        RequestsError: there is none, or one whose lengths or reuse are not known.
    """
    good = [sample for sample in sorted(record["samples"], key=lambda one: one["index"]) if sample["class"] == "ok"]
    if not good:
        raise RequestsError("the record has no request that succeeded")
    for sample in good:
        if sample["completion_tokens"] is None:
            raise RequestsError(f"request {sample['index']}: the server did not report the answer's length")
        if prompts is None and (_length(sample) is None or sample["theoretical_reuse"] is None):
            raise RequestsError(f"request {sample['index']}: the record does not say how long its prompt is, or what "
                                "it shares with those before; give --dataset and --tokenizer")
    return _rendered(good, prompts) if prompts is not None else _recorded(good)


def hits_of(record: dict[str, Any]) -> tuple[dict[int, int] | None, int]:
    """Per request the cached tokens that were reported, None where no request reports any; and how many left them out,
    which are 0 then by the platform's rule (bench/definitions.py)."""
    good = [sample for sample in record["samples"] if sample["class"] == "ok"]
    left_out = sum(sample["cached_tokens"] is None for sample in good)
    if left_out == len(good):
        return None, left_out
    return {sample["index"]: sample["cached_tokens"] or 0 for sample in good}, left_out


def _length(sample: dict[str, Any]) -> int | None:
    return sample["prompt_tokens"] or sample["expected_prompt_tokens"]


def _rendered(good: Sequence[dict[str, Any]], prompts: dict[int, Rendered]) -> list[Request]:
    numbers: dict[tuple[int, bytes], int] = {}      # (number of the block before, content) -> its own
    owners: dict[int, int] = {}
    counter = itertools.count(1)
    found = []
    for sample in good:
        index, prompt = sample["index"], prompts[sample["index"]]
        content = np.asarray(prompt.ids, np.int64)
        keys, last, shared, parent = [], 0, 0, -1
        for block in range(len(content) // BLOCK):
            key = last, content[block * BLOCK:(block + 1) * BLOCK].tobytes()
            if key in numbers:
                shared, parent = (block + 1) * BLOCK, owners[numbers[key]]
            else:
                numbers[key] = next(counter)
                owners[numbers[key]] = index
            last = numbers[key]
            keys.append(last)
        found.append(_request(sample, len(content), keys, counter, prompt.boundaries, parent,
                              min(shared, len(content) - 1)))
    return found


def _recorded(good: Sequence[dict[str, Any]]) -> list[Request]:
    """What a turn repeats beyond its conversation's last prompt, it is taken to share with the first request that is
    long enough (a system turn, say)."""
    counter = itertools.count(1)
    last: dict[str, Request] = {}
    found: list[Request] = []
    for sample in good:
        length = _length(sample) or 1
        reused = min(sample["theoretical_reuse"], length - 1)
        before = last.get(sample["conversation"])
        if before is None or len(before.keys) < reused // BLOCK:
            before = next((one for one in found if len(one.keys) >= reused // BLOCK), None)
        if not reused or before is None:
            before, reused = None, 0
        keys = before.keys[:reused // BLOCK].tolist() if before is not None else []
        keys += [next(counter) for _ in range(length // BLOCK - len(keys))]
        ends = {place for place in before.boundaries if place <= reused} if before is not None else set()
        request = _request(sample, length, keys, counter, (*ends, length - LAST_TURN),
                           before.index if before is not None else -1, reused)
        last[sample["conversation"]] = request
        found.append(request)
    return found


def _request(sample: dict[str, Any], length: int, keys: list[int], counter: Any, ends: Sequence[int], parent: int,
             shared: int) -> Request:
    """Nobody repeats its answer: the dataset's histories hold others."""
    answer = max(1, sample["completion_tokens"])
    own = [next(counter) for _ in range((length + answer) // BLOCK - length // BLOCK)]
    return Request(sample["index"], length, answer, np.array(keys, np.int64), np.array(own, np.int64),
                   tuple(sorted({place for place in ends if 0 < place < length})), parent, shared)
