"""Two ranks (gloo, two processes) of a hybrid model: the law against one rank, preempted too, and steps without a
token."""
import pickle
import subprocess
import sys
from pathlib import Path

from tests.helpers import tiny_models
from tests.models.shapes import moe, prompt, text
from worklogs.random_checkpoint import write_checkpoint

TOKENS = 8
PROMPTS = [prompt(length) for length in (1, 2, 17, 50, 130)]
ROOT = Path(__file__).resolve().parents[2]


def write_model(folder: Path) -> None:
    config = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "dtype": "float32",
              **text(48, 4, 2, (4, 1, 16), (2, 4, 16, 12), 4, 0.5, **moe(4, 2, 24, 24))}
    write_checkpoint(folder, config, seed=1)


def main(folder: str, results: str) -> None:
    engine = tiny_models.make_engine(folder, tensor_parallel_size=2, max_num_batched_tokens=48, max_num_seqs=4)
    runs = [tiny_models.run(engine, PROMPTS, tiny_models.greedy(TOKENS))]
    scheduler = engine.scheduler[0]
    scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = True, 10
    runs.append(tiny_models.run(engine, PROMPTS, tiny_models.greedy(TOKENS)))
    Path(results).write_bytes(pickle.dumps((runs, scheduler.num_cumulative_preemption)))


def test_two_ranks_are_one(tmp_path):
    model, results = tmp_path / "model", tmp_path / "results"
    write_model(model)
    # Ends by itself although its workers are alive: stock's destructor hangs at exit.
    done = subprocess.run([sys.executable, "-m", "tests.worker.test_two_ranks",
                           str(model), str(results)],
                          cwd=ROOT,
                          text=True,
                          timeout=200,
                          env=tiny_models.environment(),
                          stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == 0 and results.exists(), done.stdout[-6000:]
    runs, preempted = pickle.loads(results.read_bytes())
    assert preempted >= 5
    engine = tiny_models.make_engine(model, max_num_batched_tokens=1024)
    one = tiny_models.run(engine, PROMPTS, tiny_models.greedy(TOKENS), together=False)
    for two in runs:
        tiny_models.assert_same(two, one)


if __name__ == "__main__":
    main(*sys.argv[1:])
