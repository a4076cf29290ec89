"""What one rank and two are both made to do, and what is kept of it. As a program: two ranks, one pair of processes for
all models.

    python -m tests.worker.two_ranks FOLDER     reads FOLDER/<model>/, writes FOLDER/two_ranks.pickle
"""
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers import tiny_models
from tests.helpers.tiny_models import add, drain, greedy, run
from tests.models.conftest import flatter
from tests.models.shapes import VOCABULARY, moe, prompt, text
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.executor.cpu_executor import CPUExecutor
from vllm.overlay.engine.step_failure import NonFiniteLogits, StepFailed
from vllm.overlay.hybrid import ZERO
from vllm.worker.cpu_worker import CPUWorker
from worklogs.random_checkpoint import write_checkpoint

TOKENS = 8
SEQS = 4
BLOCKS = 64
PROMPTS = [prompt(length) for length in (1, 2, 17, 50, 130)]
FORCED = [prompt(length) for length in (5, 40, 67, 129)]
CACHED = [prompt(length) for length in (130, 200, 90)]
BUDGET = 48
# KV heads fewer than ranks, so that both have all of them; as many as ranks; and, without state, one again.
HYBRIDS = {
    "moe": {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
            **text(48, 4, 2, (4, 1, 16), (2, 4, 16, 12), 4, 0.5, **moe(4, 2, 24, 24))},
    "dense": {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
              **text(64, 4, 4, (4, 2, 32), (2, 6, 16, 8), 4, 0.5, intermediate_size=72)},
}
HYBRIDS["moe-cached"] = HYBRIDS["moe"]
DTYPES = {"moe": "float32", "dense": "float32", "attention": "float32", "moe-cached": "float32",
          "dense-bfloat16": "bfloat16"}


def write_models(folder: Path) -> None:
    for name, config in HYBRIDS.items():
        if not name.endswith("-cached"):
            write_checkpoint(folder / name, {**config, "dtype": "float32"}, seed=1, adjust=flatter)
    (folder / "moe-cached").symlink_to("moe")
    (folder / "dense-bfloat16").symlink_to("dense")
    tiny_models.make_qwen2(folder / "attention", num_key_value_heads=1, vocab_size=VOCABULARY)


class Worker(CPUWorker):
    """A rank that can be asked, and given another model."""

    def become(self, arguments: dict[str, Any]) -> None:
        """Starts anew as the same rank, in the groups that exist."""
        self.__init__(**{**arguments, "rank": self.rank, "local_rank": self.local_rank,
                         "is_driver_worker": self.is_driver_worker})

    def states(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(convolution tails, recurrent states) of all slots."""
        pool = self.model_runner.state_pool
        return None if pool is None else (pool.conv.float().numpy().copy(), pool.recurrent.numpy().copy())

    def poison(self, rank: int, layer: int, slot: int) -> None:
        """Makes one entry of this rank's part of a state NaN. layer: counted over those with state."""
        if self.rank == rank:
            self.model_runner.state_pool.recurrent[layer, slot, 0, 0, 0] = float("nan")

    def forget(self, slot: int) -> None:
        """Clears a slot that holds NaN."""
        self.model_runner.state_pool.apply_init([slot], [ZERO])

    def with_checksums(self) -> None:
        """As VLLM_OVERLAY_CHECKPOINT_CHECKSUMS=1 does."""
        self.model_runner.state_pool._with_checksums = True

    def lose_checkpoints(self, rank: int) -> None:
        """Makes this rank forget what its checkpoint slots hold."""
        if self.rank == rank:
            self.model_runner.state_pool._held.clear()

    def spoil_checkpoints(self, rank: int) -> None:
        """Changes what this rank's checkpoint slots hold."""
        pool = self.model_runner.state_pool
        if self.rank == rank:
            pool.recurrent[:, pool.num_live:] += 1

    def mistake_slots(self, ranks: tuple[int, ...]) -> None:
        """Makes these ranks exchange the slots of the first two rows, every second step."""
        runner = self.model_runner
        vars(runner).pop("execute_model", None)
        if self.rank in ranks:
            execute, count = runner.execute_model, [0]

            def mistaken(model_input: Any, *args: Any, **kwargs: Any) -> Any:
                orders = model_input.state_orders
                count[0] += 1
                if len(orders.live_slots) > 1 and count[0] % 2:
                    first, second, *rest = orders.live_slots
                    object.__setattr__(model_input, "state_orders",
                                       orders._replace(live_slots=[second, first, *rest]))
                return execute(model_input, *args, **kwargs)

            runner.execute_model = mistaken


class Executor(CPUExecutor):
    """Its first instance starts the ranks, later ones use them."""

    first: "Executor | None" = None

    def _init_executor(self) -> None:
        first = Executor.first
        if first is None or self.parallel_config.world_size == 1:
            super()._init_executor()
            Executor.first = self
            return
        self.workers, self.driver_worker = first.workers, first.driver_worker
        self.tp_driver_workers, self.non_driver_workers = first.tp_driver_workers, first.non_driver_workers
        self.worker_monitor = first.worker_monitor
        self._check_executor_parameters()
        self._run_workers("become", self._get_worker_kwargs(distributed_init_method="not used"))
        self._run_workers("init_device")
        self._run_workers("load_model")

    def _get_worker_module_and_class(self) -> Any:
        return "tests.worker.two_ranks", "Worker", None

    def shutdown(self) -> None:
        """The ranks outlive an engine, and end with the process."""


def make_engine(folder: Path, name: str, ranks: int) -> LLMEngine:
    config = EngineArgs(
        model=str(folder / name), skip_tokenizer_init=True, dtype=DTYPES[name], max_model_len=256, max_num_seqs=SEQS,
        max_num_batched_tokens=BUDGET, enable_chunked_prefill=True, num_gpu_blocks_override=BLOCKS, seed=0,
        disable_log_stats=True, enable_prefix_caching=name in ("attention", "moe-cached"), max_logprobs=VOCABULARY,
        tensor_parallel_size=ranks, distributed_executor_backend="mp" if ranks > 1 else None).create_engine_config()
    return LLMEngine(**config.to_dict(), executor_class=Executor, log_stats=False)


@dataclass
class Played:
    """What a scenario left. outputs: RequestOutputs. states: one entry per rank, None for a model without. free: (state
    slots, blocks). missed: steps that missed a checkpoint."""
    outputs: list[Any]
    preemptions: int
    states: list[tuple[np.ndarray, np.ndarray] | None]
    free: tuple[int | None, int]
    missed: int


def _play(engine: LLMEngine, scenario: Callable[[LLMEngine], list[Any]]) -> Played:
    scheduler = engine.scheduler[0]
    before, missed = scheduler.num_cumulative_preemption, scheduler.cache_stats.failures
    engine.scheduler_config.max_num_batched_tokens = BUDGET
    random.seed(0)      # Of the preemptions.
    outputs = scenario(engine)
    scheduler.enable_artificial_preemption = False
    # Where the last request was aborted, the other ranks still wait for a step.
    engine.model_executor.stop_remote_worker_execution_loop()
    return Played(outputs, scheduler.num_cumulative_preemption - before, engine.model_executor._run_workers("states"),
                  (scheduler.slots and scheduler.slots.num_free, scheduler.block_manager.get_num_free_gpu_blocks()),
                  scheduler.cache_stats.failures - missed)


def _pieces_of(tokens: int, together: bool) -> Callable[[LLMEngine], list[Any]]:
    def scenario(engine: LLMEngine) -> list[Any]:
        engine.scheduler_config.max_num_batched_tokens = tokens
        return run(engine, PROMPTS, greedy(TOKENS), together=together)
    return scenario


def _preempted(engine: LLMEngine) -> list[Any]:
    scheduler = engine.scheduler[0]
    scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = True, 10
    return run(engine, PROMPTS, greedy(TOKENS))


def _prompt_logprobs(engine: LLMEngine) -> list[Any]:
    return run(engine, PROMPTS[2:], greedy(2, prompt_logprobs=3))


def _drawn(engine: LLMEngine) -> list[Any]:
    """Several samples of a prompt beside other draws."""
    fields = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2, "detokenize": False}
    add(engine, "n", PROMPTS[2], SamplingParams(n=3, seed=50, temperature=1.0, **fields))
    add(engine, "top", PROMPTS[3], SamplingParams(seed=60, temperature=0.8, top_k=20, top_p=0.9, **fields))
    add(engine, "penalties", PROMPTS[4], SamplingParams(seed=70, temperature=1.3, repetition_penalty=1.2, min_p=0.02,
                                                        presence_penalty=0.3, **fields))
    found = drain(engine)
    return [found[name] for name in ("n", "top", "penalties")]


def _aborted(engine: LLMEngine) -> list[Any]:
    """Clients that leave: waiting, in the middle of a prompt, in the middle of an answer, and the last one of all."""
    for index in range(6):
        add(engine, f"gone{index}", prompt(100 + index), greedy(20))
    for name in ("gone1", "gone5", "gone0", "gone2", "gone3"):
        for _ in range(2):
            engine.step()
        engine.abort_request(name)
    engine.abort_request("gone4")
    assert not engine.has_unfinished_requests()
    return run(engine, PROMPTS, greedy(TOKENS))


def _failed(engine: LLMEngine) -> list[Any]:
    """A request's logits processor raises, in the first rank only and once the logits have come from all."""
    def raises(past: Any, logits: Any) -> Any:
        raise ValueError("no luck")

    failed = []
    for wait in (True, False):
        add(engine, "bad", PROMPTS[3], greedy(TOKENS, logits_processors=[raises]))
        if wait:
            # Others come in with it; the next time it is alone.
            add(engine, "beside", PROMPTS[2], greedy(TOKENS))
        while engine.has_unfinished_requests():
            try:
                engine.step()
            except StepFailed as failure:
                failed.append(sorted(failure.request_ids))
    assert failed in ([["bad", "beside"], ["bad"]], [["bad"], ["bad"]]), failed
    return run(engine, PROMPTS, greedy(TOKENS))


def _poisoned(engine: LLMEngine) -> list[Any]:
    """One entry in one rank's part of the first state: the request fails, and hears where it began."""
    executor, found = engine.model_executor, {}
    last = engine.parallel_config.world_size - 1
    add(engine, "bad", PROMPTS[3], greedy(TOKENS))
    add(engine, "good", PROMPTS[2], greedy(TOKENS))
    for _ in range(4):
        engine.step()
    slot = next(engine.scheduler[0].slots._slots[group.seqs[0].seq_id] for group in engine.scheduler[0].running
                if group.request_id == "bad")
    executor.stop_remote_worker_execution_loop()
    executor._run_workers("poison", last, 0, slot)
    failures = []
    while engine.has_unfinished_requests():
        try:
            found.update({output.request_id: output for output in engine.step()})
        except NonFiniteLogits as failure:
            failures.append(str(failure))
    (failure, ) = failures
    where = "layer 0" + ", rank 1" * last
    assert failure.endswith(f" (first seen in the recurrent state of {where})"), failure
    # So that the slots can be compared.
    executor._run_workers("forget", slot)
    return [found["good"]]


def _mistaken(engine: LLMEngine) -> list[Any]:
    engine.model_executor._run_workers("mistake_slots", (1, ))
    outputs = run(engine, PROMPTS, greedy(TOKENS))
    engine.model_executor.stop_remote_worker_execution_loop()
    engine.model_executor._run_workers("mistake_slots", ())
    return outputs


def _cached(what: str | None = None, first: bool = True) -> Callable[[LLMEngine], list[Any]]:
    """what: done to the checkpoints of one rank, the first or the last, before the requests come."""
    def scenario(engine: LLMEngine) -> list[Any]:
        executor = engine.model_executor
        executor._run_workers("with_checksums")
        if what is not None:
            executor._run_workers(what, 0 if first else engine.parallel_config.world_size - 1)
        return run(engine, CACHED, greedy(TOKENS))
    return scenario


def _forced(engine: LLMEngine) -> list[Any]:
    return run(engine, FORCED, greedy(1, prompt_logprobs=VOCABULARY))


CUTS = {"together": _pieces_of(BUDGET, True), "alone, pieces of 7": _pieces_of(7, False),
        "alone, pieces of 64": _pieces_of(64, False), "together, pieces of 16": _pieces_of(16, True),
        "preempted": _preempted, "aborted": _aborted, "a failed step": _failed}
OTHERS = {"prompt logprobs": _prompt_logprobs, "drawn": _drawn}
# The second time an attention-only model has the prompts in its prefix cache.
SCENARIOS = {
    "moe": {**CUTS, **OTHERS, "poisoned": _poisoned, "mistaken slots": _mistaken},
    "dense": {name: {**CUTS, **OTHERS}[name] for name in ("together", "alone, pieces of 7", "preempted", "drawn")},
    "attention": {"together": CUTS["together"], "warm": CUTS["together"],
                  **{name: {**CUTS, **OTHERS}[name] for name in ("together, pieces of 16", "preempted", "aborted",
                                                                 "prompt logprobs", "drawn")}},
    "moe-cached": {"cold": _cached(), "warm": _cached(), "lost by the first": _cached("lose_checkpoints"),
                   "lost by the last": _cached("lose_checkpoints", False), "warm again": _cached(),
                   "spoilt": _cached("spoil_checkpoints", False), "warm at last": _cached()},
    "dense-bfloat16": {"forced": _forced},
}


def play(folder: Path, name: str, ranks: int) -> dict[str, Played]:
    engine = make_engine(folder, name, ranks)
    return {key: _play(engine, scenario) for key, scenario in SCENARIOS[name].items()}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    played = {name: play(Path(folder), name, 2) for name in SCENARIOS}
    (Path(folder) / "two_ranks.pickle").write_bytes(pickle.dumps(played))


if __name__ == "__main__":
    # Under its own name, by which the results are unpickled.
    from tests.worker import two_ranks
    two_ranks.main(*sys.argv[1:])
