"""Times the engine's steps with one choice of operator back ends against another, without a server.

    python worklogs/step_bench.py MODEL [--batch 1,4,16] [--prefill 512,2048] [--rounds 3] [--keep]
    python worklogs/step_bench.py MODEL --arm native= --arm torch=VLLM_OVERLAY_KERNELS_MOE=torch,...

Every round starts one engine per arm, one after the other, in turns (a process of its own, so that nothing of one is
left for the next). Each measures decoding steps, per batch the median over --steps of them after a warm-up, and cold
prefills of random tokens, per length the median of three. The first arm is compared with every other: ratios of the
rounds' medians, with the range over rounds; a ratio whose range holds 1 is "no change".

By default the arms are the back ends that are chosen by themselves ("default") and PyTorch's for all ("torch"). One
thread per core, as the server; OMP_NUM_THREADS is passed on.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_record  # noqa: E402
from bench.progress import Progress  # noqa: E402

CONTEXT, WARM_UP = 200, 8


class ArmError(Exception):
    """An arm that did not measure; one line."""


def engine(options: argparse.Namespace) -> dict[str, Any]:
    """What one engine measures, in this process: its back ends, seconds per step by batch and per prefill by length."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Its report asks a child process for the processor's features, on a core that the first steps need.
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams
    from vllm.overlay.kernels.backend import choose_all
    longest = max([CONTEXT + options.steps + WARM_UP + 8, *(length + 8 for length in options.prefill)])
    model = LLM(options.model, max_model_len=longest, max_num_seqs=max(options.batch), enable_chunked_prefill=True,
                enable_prefix_caching=True, max_num_batched_tokens=max(2048, max(options.batch)),
                skip_tokenizer_init=True).llm_engine
    rng = random.Random(0)
    # Ordinary tokens: what stands for a picture or ends a turn comes last.
    vocabulary = model.model_config.get_vocab_size() // 2

    def add(name: str, length: int, tokens: int) -> None:
        ids = [rng.randrange(vocabulary) for _ in range(length)]
        model.add_request(name, {"prompt_token_ids": ids}, SamplingParams(temperature=0.0, max_tokens=tokens,
                                                                          ignore_eos=True, detokenize=False))

    def drain() -> None:
        while model.has_unfinished_requests():
            model.step()

    def step() -> float:
        started = time.perf_counter()
        model.step()
        return time.perf_counter() - started

    decode: dict[str, float] = {}
    for batch in options.batch:
        for row in range(batch):
            add(f"d{batch}-{row}", CONTEXT, options.steps + WARM_UP + 2)
        while any(group.is_prefill() for group in (*model.scheduler[0].waiting, *model.scheduler[0].running)):
            model.step()
        for _ in range(WARM_UP):
            model.step()
        decode[str(batch)] = statistics.median(step() for _ in range(options.steps - WARM_UP))
        drain()
    prefill: dict[str, float] = {}
    for length in options.prefill:
        found = []
        for turn in range(3):
            add(f"p{length}-{turn}", length, 1)
            started = time.perf_counter()
            drain()
            found.append(time.perf_counter() - started)
        prefill[str(length)] = statistics.median(found)
    return {"back_ends": choose_all(), "decode_s": decode, "prefill_s": prefill}


def torch_for_all() -> dict[str, str]:
    """The environment in which every operator asks PyTorch."""
    from vllm.overlay.kernels.backend import operators
    return {backends.variable: "torch" for backends in operators().values()}


def arm(text: str) -> tuple[str, dict[str, str]]:
    """NAME=VARIABLE=VALUE,... -> the arm's name and environment."""
    name, equals, rest = text.partition("=")
    pairs = [pair.split("=", 1) for pair in rest.split(",") if pair]
    if not name or not equals or any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VARIABLE=VALUE,...")
    return name, dict(pairs)


def measure(words: list[str], environment: dict[str, str], name: str) -> dict[str, Any]:
    """One engine, in a process of its own.

    Raises:
        ArmError: it failed.
    """
    done = subprocess.run([sys.executable, __file__, *words, "--child"], env={**os.environ, **environment}, text=True,
                          capture_output=True)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no output"]
        raise ArmError(f"arm {name}: exit status {done.returncode}: {last[0]}")
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(rounds: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Per measured thing and arm: median and range of seconds; for all arms but the first how many times as long as the
    first they take, by round."""
    first, *others = list(rounds[0])
    found = []
    for kind in ("decode_s", "prefill_s"):
        for size in rounds[0][first][kind]:
            for name in (first, *others):
                seconds = [one[name][kind][size] for one in rounds]
                row = {"what": kind.removesuffix("_s"), "size": int(size), "arm": name,
                       "median_s": statistics.median(seconds), "least_s": min(seconds), "most_s": max(seconds)}
                if name != first:
                    ratios = [one[name][kind][size] / one[first][kind][size] for one in rounds]
                    row["ratio"] = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
                    row["no_change"] = min(ratios) <= 1 <= max(ratios)
                found.append(row)
    return found


def line(row: dict[str, Any], first: str) -> str:
    """A row for people."""
    what = f"{row['what']} {row['size']:,}"
    text = f"{what:16s} {row['arm']:10s} {row['median_s'] * 1e3:10.2f} ms ({row['least_s'] * 1e3:.2f} to " \
           f"{row['most_s'] * 1e3:.2f})"
    if "ratio" in row:
        ratio = row["ratio"]
        text += f"  {ratio['median']:.2f} times {first} ({ratio['least']:.2f} to {ratio['most']:.2f})" \
                + ("  no change" if row["no_change"] else "")
    return text


def _sizes(text: str) -> list[int]:
    return [int(value) for value in text.split(",") if value]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 measured, 1 an arm failed, 2 the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=_sizes, default=[1, 4, 16], help="sequences of a decoding step")
    parser.add_argument("--prefill", type=_sizes, default=[512, 2048], help="tokens of a cold prompt")
    parser.add_argument("--steps", type=int, default=60, help="decoding steps per batch, with the warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", type=arm, action="append", metavar="NAME=VARIABLE=VALUE,...", help="two or more")
    parser.add_argument("--keep", action="store_true", help="keep the outcome in remote_results/")
    parser.add_argument("--no-progress", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.steps <= WARM_UP or options.rounds < 1 or min([1, *options.batch, *options.prefill]) < 1:
        parser.error(f"--steps is more than {WARM_UP}, everything else at least 1")
    if options.child:
        print(json.dumps(engine(options)))
        return 0
    arms = dict(options.arm or [("default", {}), ("torch", torch_for_all())])
    if len(arms) < 2:
        parser.error("--arm is to be given twice or more, with different names")
    words = [options.model, "--batch", ",".join(map(str, options.batch)), "--prefill",
             ",".join(map(str, options.prefill)), "--steps", str(options.steps)]
    progress = Progress(options.rounds * len(arms), not options.no_progress)
    rounds: list[dict[str, dict[str, Any]]] = []
    try:
        for turn in range(options.rounds):
            # Each arm is first in its turn: what follows an engine of the other kind is not always the same one.
            order = list(arms)[turn % len(arms):] + list(arms)[:turn % len(arms)]
            found = {}
            for name in order:
                progress.show(turn * len(arms) + len(found), f"round {turn + 1}: {name}")
                found[name] = measure(words, arms[name], name)
            rounds.append({name: found[name] for name in arms})
    except ArmError as error:
        print(f"step_bench: {error}", file=sys.stderr)
        return 1
    finally:
        progress.close()
    rows, first = rows_of(rounds), next(iter(arms))
    for name in arms:
        print(f"{name}: " + ", ".join(f"{op} {back_end}" for op, back_end in rounds[0][name]["back_ends"].items()))
    print(*(line(row, first) for row in rows), sep="\n")
    if options.keep:
        command = bench_record.without_paths([Path(sys.argv[0]).name, *(sys.argv[1:] if arguments is None else
                                                                        arguments)])
        path = bench_record.keep("engine-steps", {
            "kind": "engine-steps", **bench_record.commit(), "machine": bench_record.machine(), "command": command,
            "model": Path(options.model).resolve().name, "threads": os.environ.get("OMP_NUM_THREADS"),
            "arms": arms, "rounds": rounds, "rows": rows})
        print(f"kept as {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
