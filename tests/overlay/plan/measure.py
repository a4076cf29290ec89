"""The memory that one step of a small hybrid model takes at its peak, as the allocator counts it."""
import json
from pathlib import Path
from typing import Any

import torch

from tests.helpers.tiny_models import add, greedy, make_engine


def make_config(folder: Path, fields: dict[str, Any]) -> Path:
    """Writes config.json of a text model; its weights are dummies. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    moe = "num_experts" in fields
    kind = "qwen3_5_moe_text" if moe else "qwen3_5_text"
    architecture = "Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"
    (folder / "config.json").write_text(json.dumps({
        "dtype": "float32", "tie_word_embeddings": False, "model_type": kind, "architectures": [architecture],
        **fields, "max_position_embeddings": 4096}))
    return folder


def peak_of_step(engine: Any, prompts: list[list[int]], **sampling: Any) -> int:
    """Bytes by which memory rises at most while the prompts are computed, together and in one step."""
    for index, tokens in enumerate(prompts):
        add(engine, f"r{index}", tokens, greedy(1, logprobs=None, **sampling))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        outputs = engine.step()
    assert len(outputs) == len(prompts) and all(output.finished for output in outputs), "it was not one step"
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    when = "start_ns" if hasattr(events[0], "start_ns") else "start_us"
    held = peak = 0
    for event in sorted(events, key=lambda event: getattr(event, when)()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def engine_of(folder: Path, tokens: int, **arguments: Any) -> Any:
    return make_engine(folder, load_format="dummy", max_model_len=4096, max_num_batched_tokens=tokens, max_num_seqs=4,
                       num_gpu_blocks_override=512, **arguments)
