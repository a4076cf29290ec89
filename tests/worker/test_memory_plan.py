"""The plan of a start: refused before weights are loaded, fewer sequences where states allow no more, and on a card two
short steps in place of one of full length."""
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_models import assert_same, greedy, make_engine, run
from tests.models.shapes import moe, prompt, text
from vllm.overlay.plan import engine as plan_engine
from vllm.overlay.plan.checkpoints import Room
from vllm.overlay.runtime import platform_cpu
from worklogs.random_checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("planned") / "model"
    write_checkpoint(folder, {**text(64, 4, 4, (4, 2, 32), (2, 4, 64, 64), 4, 0.5, **moe(4, 2, 24, 40)),
                              "vocab_size": 512, "max_position_embeddings": 8192, "model_type": "qwen3_5_moe_text",
                              "dtype": "float32", "architectures": ["Qwen3_5MoeForCausalLM"],
                              "tie_word_embeddings": False}, seed=5)
    return folder


@pytest.fixture
def free(monkeypatch):
    """Sets how much memory seems free, in bytes."""
    return lambda size: monkeypatch.setattr(platform_cpu, "available_memory", lambda: size)


@pytest.fixture
def said(monkeypatch):
    """What the planner logs: [(level, text)]."""
    found = []

    def keep(level):
        return lambda message, *arguments: found.append((level, message % arguments if arguments else message))

    for level in ("info", "warning"):
        monkeypatch.setattr(plan_engine.logger, level, keep(getattr(logging, level.upper())))
    return found


def test_refused_before_weights_are_loaded(checkpoint, free, monkeypatch):
    from vllm.worker.worker_stock import Worker
    monkeypatch.setattr(Worker, "load_model", lambda self: pytest.fail("weights were loaded"))
    free(platform_cpu.GIB // 4 + 7 * MIB)
    with pytest.raises(ValueError, match=r"^too little memory for one sequence of max_model_len 8192: .*lower "
                                         r"--max-model-len to \d+") as caught:
        make_engine(checkpoint, max_model_len=8192, num_gpu_blocks_override=None)
    assert "\n" not in str(caught.value)


def test_too_many_sequences_are_lowered(checkpoint, free, said):
    """Scheduler, states and workers come to one number, and more requests than that are answered."""
    prompts = [prompt(length) for length in (3, 50, 21, 9, 33)]
    arguments = {"num_gpu_blocks_override": None, "max_num_batched_tokens": 2048}
    expected = run(make_engine(checkpoint, max_num_seqs=8, **arguments), prompts, greedy(6))
    found = next(text for _, text in said if text.startswith("Memory plan"))
    assert "8 sequences of 0.2 MiB" in found and len(found.splitlines()) == 7, found
    assert not [text for level, text in said if level == logging.WARNING]
    free(platform_cpu.GIB // 4 + 60 * MIB)
    engine = make_engine(checkpoint, max_num_seqs=2000, **arguments)
    seqs = engine.scheduler_config.max_num_seqs
    warnings = [text for level, text in said if level == logging.WARNING]
    assert 1 < seqs < 300 and len(warnings) == 1 and f"lowered from 2000 to {seqs}: " in warnings[0], (seqs, warnings)
    worker = engine.model_executor.driver_worker
    assert worker.model_runner.state_pool.num_slots == seqs == engine.scheduler[0].slots.num_free
    assert worker.scheduler_config.max_num_seqs == engine.scheduler[0].scheduler_config.max_num_seqs == seqs
    assert_same(run(engine, prompts, greedy(6)), expected)


def started(checkpoint, **arguments):
    """(engine, its pool, what its cache's configuration says of checkpoints)"""
    engine = make_engine(checkpoint, **{"enable_prefix_caching": True, **arguments})
    cache, pool = engine.cache_config, engine.model_executor.driver_worker.model_runner.state_pool
    assert pool.num_slots == pool.num_live + cache.num_checkpoint_slots
    assert pool.host.num_slots == cache.num_host_checkpoint_slots
    return engine, pool, (cache.num_checkpoint_slots, cache.num_host_checkpoint_slots)


def test_room_for_checkpoints(checkpoint, said):
    """One for each 64 tokens of KV and one per sequence where memory is plenty; or as was asked."""
    engine, pool, counts = started(checkpoint)
    assert counts == (512 * 16 // 64 + 8, 0) and pool.num_live == 8 and engine.cache_config.enable_prefix_caching
    table = next(text for _, text in said if text.startswith("Memory plan"))
    assert "136 of 0.2 MiB; none on the host" in table, table
    slot = pool.spec.slot_bytes
    _, _, counts = started(checkpoint, checkpoint_memory=20 * slot, checkpoint_host_memory=f"{31 * slot}B")
    assert counts == (20, 31)
    assert not [text for level, text in said if level == logging.WARNING]
    engine, _, counts = started(checkpoint, enable_prefix_caching=False)
    assert counts == (0, 0) and not engine.cache_config.enable_prefix_caching


@pytest.mark.parametrize("asked, words", [
    (0, "--checkpoint-memory is 0 MiB"), ("1KiB", "--checkpoint-memory is 0.000977 MiB"),
    (None, "no memory is left for checkpoints")])
def test_no_room_for_one_checkpoint(checkpoint, monkeypatch, asked, words):
    """It works without the cache, and one line says so."""
    from vllm.overlay.hybrid import plan as hybrid_plan
    lines = []
    monkeypatch.setattr(hybrid_plan.logger, "warning", lambda line, *args: lines.append(line % args))
    if asked is None:
        monkeypatch.setattr(Room, "on_device", lambda self: 0)
    engine, _, counts = started(checkpoint, checkpoint_memory=asked, checkpoint_host_memory="1MiB")
    assert counts == (0, 0) and not engine.cache_config.enable_prefix_caching
    (line, ) = lines
    assert line == (f"Prefix caching is off: {words}, and one "
                    "checkpoint of this model's recurrent state takes 0.205 MiB.")
    prompts = [prompt(length) for length in (3, 150, 21)]
    first, second = (run(engine, prompts, greedy(6)) for _ in range(2))
    assert_same(second, first)
    assert {output.num_cached_tokens for output in (*first, *second)} == {0}


def test_sizes_that_do_not_fit(checkpoint, free, said):
    """On the device lowered, with a line; on the host refused, with a line."""
    free(platform_cpu.GIB // 4 + 60 * MIB)
    engine, pool, (count, _) = started(checkpoint, num_gpu_blocks_override=None, checkpoint_memory="1GiB",
                                       max_num_batched_tokens=2048)
    (warning, ) = [text for level, text in said if level == logging.WARNING]
    assert warning.startswith("--checkpoint-memory is lowered from 1.00 GiB to "), warning
    assert 0 < count * pool.spec.slot_bytes < 60 * MIB and engine.scheduler_config.max_num_seqs == 8
    with pytest.raises(ValueError, match=r"^--checkpoint-host-memory 2.00 GiB on each of 1 ranks is more than the "
                                         r"0.31 GiB of main memory that are free: lower it$"):
        started(checkpoint, checkpoint_host_memory="2GiB")


def test_a_cache_that_was_asked_for_is_not_refused(checkpoint, free, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    free(platform_cpu.GIB // 4 + MIB)
    engine = make_engine(checkpoint, max_num_seqs=2, num_gpu_blocks_override=64)
    assert engine.cache_config.num_gpu_blocks == 64 and not engine.model_executor.driver_worker.plan.fits


def test_a_model_that_is_not_counted(qwen2):
    assert make_engine(qwen2).model_executor.driver_worker.plan is None


CARD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tests.helpers.cuda_standin import GIB, TOTAL, install
calls = install()
import torch
from vllm import LLM
from vllm.worker.model_runner import ModelRunner
from vllm.worker.worker import Worker

steps = []

def profile_run(self):
    steps.append((self.scheduler_config.max_num_batched_tokens, self.scheduler_config.max_num_seqs))
    # A step takes 64 MiB and 32 KiB a token: more than planned for this small model.
    torch.cuda.max_memory_allocated = lambda *_: (64 << 20) + 32768 * steps[-1][0]

ModelRunner.profile_run = profile_run
# A cache of the size of a card is not to be made of this machine's memory.
Worker._init_cache_engine = lambda self: setattr(self, "gpu_cache", None)
llm = LLM(model=sys.argv[2], skip_tokenizer_init=True, load_format="dummy", dtype="float32", block_size=16,
          enable_chunked_prefill=True, max_num_batched_tokens=16384, max_num_seqs=4, max_model_len=8192,
          gpu_memory_utilization=0.9)
worker = llm.llm_engine.model_executor.driver_worker
print("RESULT", json.dumps({"steps": steps, "blocks": llm.llm_engine.cache_config.num_gpu_blocks,
    "restored": worker.model_runner.scheduler_config is worker.scheduler_config, "planned": worker.plan.capacity,
    "block_bytes": worker.get_cache_block_size_bytes(), "total": TOTAL, "calls": calls,
    "workers": type(worker).__module__}))
"""


@pytest.mark.parametrize(("at_start", "expected"), [(32, 16), (12, 7)], ids=["alone", "beside another process"])
def test_the_cache_is_no_larger_than_what_is_free(monkeypatch, at_start, expected):
    """In GiB: a card of 32, of which 20.8 may be taken (at_start 12: another process holds 20); weights take 4, a step
    nothing but what is kept for fragments."""
    from types import SimpleNamespace

    from vllm.overlay.plan.memory import GIB
    from vllm.overlay.runtime.phases import Phases
    from vllm.worker.worker import _FRAGMENT_BYTES, Worker

    worker = Worker.__new__(Worker)
    worker.plan = SimpleNamespace(step=0, tower=0, held=0)
    worker.cache_config = SimpleNamespace(gpu_memory_utilization=0.65)
    worker.init_gpu_memory, worker.rank, worker.phases = at_start * GIB, 1, Phases(0.0)
    monkeypatch.setattr(worker, "_extrapolated", lambda: 0)
    monkeypatch.setattr(worker, "get_cache_block_size_bytes", lambda: GIB)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: ((at_start - 4) * GIB, 32 * GIB))
    left = int(32 * GIB * 0.65) - 4 * GIB - _FRAGMENT_BYTES
    blocks, _ = worker.determine_num_available_blocks()
    assert blocks == expected == min(left, (at_start - 4) * GIB - _FRAGMENT_BYTES) // GIB, (blocks, expected)


def test_two_short_steps_on_a_card(checkpoint, tmp_path):
    """Stock's own worker, on a card made of the CPU: 16,384 tokens per step, of which 1,024 and 2,048 are computed."""
    done = subprocess.run([sys.executable, "-c", CARD, ROOT, checkpoint], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-1500:]}{done.stderr[-3000:]}"
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])
    assert found["workers"] == "vllm.worker.worker" and found["steps"] == [[1024, 1], [2048, 1]] and found["restored"]
    assert found["calls"].count("reset_peak_memory_stats") >= 2 and "mem_get_info" in found["calls"]
    # Extrapolated: 64 MiB and 32 KiB for each of 16,384 tokens, a tenth and a quarter of a GiB for fragments.
    reserve = int(((64 << 20) + 32768 * 16384) * 1.1) + (1 << 28)
    looks = found["calls"].count("mem_get_info")
    left = 0.9 * found["total"] - reserve - found["blocks"] * found["block_bytes"]
    # Every look at the stand-in's memory finds a quarter of a GiB less.
    assert left > 0 and left % (1 << 28) < found["block_bytes"] + 16 and left <= looks << 28, (left, looks)
    log = done.stdout + done.stderr
    assert "Memory as measured: " in log and "Engine up after " in log and "Memory plan" in log, log[-3000:]
