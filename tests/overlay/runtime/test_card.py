"""The ways that only a CUDA device takes: stock's executor, worker and memory query, on a card made of the CPU.

What it computes must be what the CPU's own worker computes.
"""
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.models.shapes import moe, text
from worklogs.random_checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[3]
# One for each 64 of the KV cache's 128 * 16 tokens, and one for each of four sequences.
CHECKPOINTS = 36
SERVE = """
import json, sys
sys.path.insert(0, sys.argv[1])
calls = []
if sys.argv[3] == "card":
    from tests.helpers.cuda_standin import install
    calls = install()
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[2], skip_tokenizer_init=True, dtype="float32", enable_chunked_prefill=True, block_size=16,
          enable_prefix_caching=True, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=512,
          gpu_memory_utilization=0.9, num_gpu_blocks_override=128, swap_space=0)
prompts = [{"prompt_token_ids": [(7 * i * n + i * i) % 500 for i in range(n)]} for n in (5, 150, 33)]
params = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
outputs, again = (llm.generate(prompts, params, use_tqdm=False) for _ in range(2))
engine = llm.llm_engine
worker = engine.model_executor.driver_worker
print("RESULT", json.dumps({
    "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    "again": [list(output.outputs[0].token_ids) for output in again],
    "cached": [output.num_cached_tokens for output in again],
    "device": engine.device_config.device_type, "executor": type(engine.model_executor).__name__,
    "worker": f"{type(worker).__module__}.{type(worker).__name__}",
    "attention": worker.model_runner.attn_backend.get_name(), "blocks": engine.cache_config.num_gpu_blocks,
    "slots": worker.model_runner.state_pool.num_slots, "calls": sorted(set(calls))}))
"""


def served(model: Path, device: str) -> dict:
    done = subprocess.run([sys.executable, "-c", SERVE, ROOT, model, device], capture_output=True, text=True)
    assert done.returncode == 0, f"{device}: {done.stdout[-1500:]}{done.stderr[-3000:]}"
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])


def test_a_hybrid_model_on_a_card(tmp_path):
    fields = {**text(64, 4, 4, (4, 2, 32), (2, 4, 16, 16), 4, 0.5, **moe(4, 2, 24, 40)), "vocab_size": 512,
              "max_position_embeddings": 512, "model_type": "qwen3_5_moe_text", "dtype": "float32",
              "architectures": ["Qwen3_5MoeForCausalLM"], "tie_word_embeddings": False}
    write_checkpoint(tmp_path, fields, seed=5)
    with ThreadPoolExecutor() as pool:
        card, cpu = pool.map(served, (tmp_path, tmp_path), ("card", "cpu"))
    assert (card["device"], card["executor"], card["worker"], card["attention"], card["slots"]) == (
        "cuda", "GPUExecutor", "vllm.worker.worker.Worker", "torch-paged", 4 + CHECKPOINTS), card
    assert (cpu["device"], cpu["worker"]) == ("cpu", "vllm.worker.cpu_worker.CPUWorker"), cpu
    assert {"set_device", "mem_get_info", "synchronize", "empty_cache"} <= set(card["calls"]), card
    assert card["tokens"] == cpu["tokens"] == card["again"] == cpu["again"], (card, cpu)
    assert card["cached"] == cpu["cached"] == [0, 144, 0], (card["cached"], cpu["cached"])
