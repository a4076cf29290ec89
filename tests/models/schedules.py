"""Random schedules of requests over one tree of prompts: what happens beside, before and during a request must not show
in it. As a program: the same on two ranks.

    python -m tests.models.schedules MODEL SEED ...     prints one line "PLAYED" with the outputs as JSON
"""
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from tests.helpers.tiny_models import add, greedy, make_engine
from tests.models.shapes import VOCABULARY
from vllm.overlay.engine.step_failure import StepFailed
from vllm.sequence import Logprob

NEW = 8
REQUESTS = 14
# Of the checkpoint that conftest.py makes.
SLOT_BYTES = 3 * (3 * 128 + 4 * 16 * 16) * 4
DEVICE, HOST, BLOCKS = 14, 6, 90


@dataclass(frozen=True)
class Prompt:
    """ids, and the boundaries that a server would tell."""
    ids: list[int]
    boundaries: tuple[int, ...]


def _tree(count: int) -> list[Prompt]:
    """Prompts of 20 to 420 tokens, most of which begin as another one does, for a while."""
    rng = random.Random(5)
    found: list[Prompt] = []
    while len(found) < count:
        stem: list[int] = []
        if found and rng.random() < 0.8:
            stem = rng.choice(found).ids
            stem = stem[:rng.choice((len(stem), rng.randrange(len(stem))))]
        ids = stem + [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 5, 20, 60, 130, 200)))]
        if 20 <= len(ids) <= 420:
            found.append(Prompt(ids, tuple(sorted(rng.sample(range(1, len(ids)), 3)))))
    return found


PROMPTS = _tree(24)


@dataclass
class Played:
    """outputs: (index of the prompt, RequestOutput) of every request that was finished."""
    outputs: list[tuple[int, Any]] = field(default_factory=list)
    aborted: int = 0
    failed: int = 0
    preempted: int = 0

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(output.num_cached_tokens for _, output in self.outputs)


def cached_engine(model: Any, **arguments: Any) -> Any:
    """Few blocks, few checkpoints on the device, fewer on the host, so that all of them run out."""
    slot_bytes = SLOT_BYTES // arguments.get("tensor_parallel_size", 1)
    engine = make_engine(model, **{
        "enable_prefix_caching": True, "max_num_seqs": 4, "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": BLOCKS, "checkpoint_memory": DEVICE * slot_bytes,
        "checkpoint_host_memory": HOST * slot_bytes, **arguments})
    cache = engine.cache_config
    assert (cache.num_checkpoint_slots, cache.num_host_checkpoint_slots) == (DEVICE, HOST)
    # These prompts are too short for the default.
    store = engine.scheduler[0].prefixes.store
    store.policy = replace(store.policy, demoted_above=32)
    return engine


def play(engine: Any, seed: int, fail: bool = True) -> Played:
    """Plays one schedule to its end: requests that come at any time, leave at any time, are preempted, and steps that
    fail. It begins with an empty cache or with what the last one left. fail: whether steps may fail."""
    rng = random.Random(seed)
    random.seed(seed)       # Of the preemptions.
    scheduler, executor = engine.scheduler[0], engine.model_executor
    engine.scheduler_config.max_num_batched_tokens = rng.choice((16, 50, 128, 1024))
    if rng.random() < 0.4:
        scheduler.reset_prefix_cache()
    before = scheduler.num_cumulative_preemption
    played, alive, waiting = Played(), {}, REQUESTS
    forward = type(executor).execute_model
    while waiting or engine.has_unfinished_requests():
        event = rng.random()
        if waiting and (event < 0.3 or not alive):
            index, name = rng.randrange(len(PROMPTS)), f"{seed}-{waiting}"
            there = PROMPTS[index]
            add(engine, name, {"prompt_token_ids": list(there.ids), "multi_modal_data": {
                "boundaries": there.boundaries}} if rng.random() < 0.5 else there.ids, greedy(rng.randint(1, NEW)))
            alive[name] = index
            waiting -= 1
            continue
        if event < 0.34 and alive:
            name = rng.choice(sorted(alive))
            engine.abort_request(name)
            del alive[name]
            played.aborted += 1
            continue
        if event < 0.4:
            scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = True, rng.randint(1, 3)
        if event > 0.97 and fail:
            executor.execute_model = _failing(executor, forward, rng.random() < 0.5)
        try:
            outputs = engine.step()
        except StepFailed as failure:
            played.failed += len(failure.request_ids)
            for name in failure.request_ids:
                del alive[name]
            outputs = []
        vars(executor).pop("execute_model", None)
        for output in outputs:
            if output.finished:
                played.outputs.append((alive.pop(output.request_id), output))
    scheduler.enable_artificial_preemption = False
    played.preempted = scheduler.num_cumulative_preemption - before
    assert scheduler.slots.num_free == engine.scheduler_config.max_num_seqs
    return played


def _failing(executor: Any, forward: Any, after: bool) -> Any:
    """A step that raises, before or after the states of its rows have moved on."""
    def execute_model(*args: Any, **kwargs: Any) -> Any:
        if after:
            forward(executor, *args, **kwargs)
        raise RuntimeError("no luck")
    return execute_model


def beginnings(played: Played, alone: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(outputs, what they must be) in `assert_same`'s form. alone: the outputs of all prompts, each computed whole and
    by itself, with NEW tokens."""
    expected = []
    for index, output in played.outputs:
        right, length = alone[index].outputs[0], len(output.outputs[0].token_ids)
        expected.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=right.token_ids[:length],
                                                                 logprobs=right.logprobs[:length])]))
    return [output for _, output in played.outputs], expected


def as_json(played: Played) -> dict[str, Any]:
    """What crosses from the program of two ranks."""
    return {**vars(played), "outputs": [
        (index, output.num_cached_tokens, list(output.outputs[0].token_ids),
         [{token: entry.logprob for token, entry in place.items()} for place in output.outputs[0].logprobs])
        for index, output in played.outputs]}


def from_json(found: dict[str, Any]) -> Played:
    outputs = []
    for index, cached, tokens, logprobs in found["outputs"]:
        places = [{int(token): Logprob(value) for token, value in place.items()} for place in logprobs]
        outputs.append((index, SimpleNamespace(num_cached_tokens=cached, outputs=[
            SimpleNamespace(token_ids=tuple(tokens), logprobs=places)])))
    return Played(**{**found, "outputs": outputs})


if __name__ == "__main__":
    two = cached_engine(sys.argv[1], tensor_parallel_size=2, distributed_executor_backend="mp")
    # With several ranks a step that fails where they exchange tensors ends the engine.
    print("PLAYED", json.dumps([as_json(play(two, int(seed), fail=False)) for seed in sys.argv[2:]]), flush=True)
