"""Records of formal runs, made up: a server whose costs are known, seen through noise."""
import json
import random
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "worklogs"))
from bench import definitions, stats  # noqa: E402
from cost_model import Costs  # noqa: E402
from engine_cache import Given  # noqa: E402
from engine_model import Setting, simulate  # noqa: E402
from replay_trace import BLOCK, Request  # noqa: E402

TRUTH = Costs({"step": 0.030, "experts": 0.0, "prefill_token": 4e-4, "prefill_context": 2e-8, "decode_token": 0.004,
               "decode_context": 2e-7, "prompt_token": 5e-6, "request": 0.010})
CHUNK = 2048


def conversations(count: int = 8, turns: int = 4, seed: int = 0) -> tuple[list[Request], dict[int, tuple[str, int]]]:
    """Requests of growing conversations, one turn of each after the other, and (conversation, turn) of each."""
    chance = random.Random(seed)
    numbers = iter(range(1, 1 << 40))
    requests: list[Request] = []
    places: dict[int, tuple[str, int]] = {}
    last: dict[int, Request] = {}
    for turn in range(turns):
        for conversation in range(count):
            before = last.get(conversation)
            reused = before.length // BLOCK * BLOCK if before else 0
            length = (before.length if before else 0) + chance.randrange(300, 2500)
            keys = [*(before.keys[:reused // BLOCK].tolist() if before else []),
                    *(next(numbers) for _ in range(length // BLOCK - reused // BLOCK))]
            answer = chance.randrange(20, 120)
            own = [next(numbers) for _ in range((length + answer) // BLOCK - length // BLOCK)]
            request = Request(len(requests), length, answer, np.array(keys, np.int64), np.array(own, np.int64),
                              (length - 5, ), before.index if before else -1, reused)
            places[request.index] = (f"c{conversation}", turn)
            requests.append(request)
            last[conversation] = request
    return requests, places


def record(concurrency: int = 1, costs: Costs = TRUTH, noise: float = 0.02, seed: int = 0, version: str = "1",
           count: int = 8, fail: tuple[int, ...] = (), chunk: int = CHUNK) -> dict:
    """A run of `conversations` on a server of these costs with a prefix cache that finds what repeats."""
    requests, places = conversations(count)
    chance = random.Random(seed)
    hits = {request.index: request.shared for request in requests}
    samples, wall = simulate(requests, Given(hits), costs, Setting(concurrency, chunk, max_num_seqs=8))
    for sample in samples:
        sample["conversation"], sample["turn"] = places[sample["index"]]
        sample["finish"] = "stop"
        first, last = sample["first_s"] - sample["sent_s"], sample["last_s"] - sample["first_s"]
        sample["first_s"] = sample["sent_s"] + first * (1 + chance.gauss(0, noise))
        sample["last_s"] = sample["first_s"] + last * (1 + chance.gauss(0, noise))
        if sample["index"] in fail:
            sample.update({"class": "timeout", "status": None, "error": "<timed out> & gone", "first_s": None,
                           "completion_tokens": None, "finish": None})
    return {"kind": "formal-perf", "utc": "2026-12-02T00:00:00+00:00", "definitions": definitions.VERSION,
            "server": {"kind": "stub", "version": version,
                       "command": f"serve --max-num-batched-tokens {chunk} --max-num-seqs 8"},
            "commit": "abcdef0123", "changed": False, "machine": {"cores": 2, "flags": ["avx2"]}, "command": "bench",
            "dataset": {"name": "made_up.jsonl", "sha256": "00", "requests": len(samples), "seed": 0, "cap": 0},
            "model": "llm", "mode": "closed", "concurrency": concurrency, "max_tokens": None, "cache_before": "reset",
            "warm_up": 0, "wall_s": wall, "client": {"loop_lag_ms": {"p50": 0.1, "p99": 1, "max": 2}, "healthy": True},
            "ended_early": None, "samples": samples, "summary": definitions.summary(samples, wall),
            "intervals": stats.bootstrap(samples, wall, definitions.summary, rounds=50)}


def summed(content: dict) -> dict:
    """The record with the figures of its samples, which a test changed."""
    return {**content, "summary": definitions.summary(content["samples"], content["wall_s"])}


def write(folder: Path, name: str, content: dict) -> Path:
    """As a file."""
    path = folder / name
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
