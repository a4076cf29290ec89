"""Checkpoints of a few hundred kilobytes, made on the fly, and engines over them.

The weights are drawn with a large deviation, so that greedy output wanders over the vocabulary instead of looping.
"""
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

VOCABULARY = 512


def make_qwen2(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    """Writes a random Qwen2 checkpoint without a tokenizer to `folder` and returns it. `sizes` are fields of
    Qwen2Config."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    if (folder / "config.json").is_file():
        return folder
    config = Qwen2Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "initializer_range": 0.2,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": dtype,
            **sizes
        })
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).to(dtype)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder, safe_serialization=True)
    if "architectures" in sizes:
        # Saving writes the class's own name.
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, "architectures": sizes["architectures"]}))
    return folder


def prompt(length: int, seed: int) -> list[int]:
    """Returns `length` token ids that depend on nothing but the arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (length, ), generator=generator).tolist()


def make_engine(model: Path, **arguments: Any) -> Any:
    """Returns an LLMEngine in this process; `arguments` are EngineArgs fields."""
    from vllm import EngineArgs, LLMEngine
    return LLMEngine.from_engine_args(EngineArgs(**{
        "model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8,
        "max_num_batched_tokens": 128, "enable_chunked_prefill": True, "num_gpu_blocks_override": 512, "seed": 0,
        "disable_log_stats": True, **arguments}))


def rows_stay() -> Any:
    """A context in which engines that are made do not pack their weights: a test can read these."""
    return mock.patch("vllm.worker.worker.pack_weights")


def make_readable_engine(model: Path, **arguments: Any) -> Any:
    """As make_engine; its weights stay rows."""
    with rows_stay():
        return make_engine(model, **arguments)


def model_of(engine: Any) -> Any:
    """The model of an engine of one process."""
    return engine.model_executor.driver_worker.model_runner.model


def greedy(max_tokens: int, **fields: Any) -> Any:
    """Returns parameters of a greedy request with the logprob of every token."""
    from vllm import SamplingParams
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2,
                             "detokenize": False, **fields})


def add(engine: Any, request_id: str, tokens: Any, params: Any) -> None:
    """tokens: token ids, or a TokensPrompt."""
    prompt = tokens if isinstance(tokens, dict) else {"prompt_token_ids": list(tokens)}
    engine.add_request(request_id, prompt, params)


def drain(engine: Any, limit: int = 10_000) -> dict[str, Any]:
    """Steps the engine until nothing is left and returns the last output of each request."""
    found = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests():
            return found
        for output in engine.step():
            found[output.request_id] = output
    raise AssertionError(f"{limit} steps were not enough; unfinished: {engine.get_num_unfinished_requests()}")


def run(engine: Any, prompts: Sequence[Any], params: Any, tag: str = "r", together: bool = True) -> list[Any]:
    """Returns the final outputs of `prompts`, run as one batch or one after the other."""
    found: dict[str, Any] = {}
    for index, tokens in enumerate(prompts):
        add(engine, f"{tag}{index}", tokens, params)
        if not together:
            found.update(drain(engine))
    found.update(drain(engine))
    return [found[f"{tag}{index}"] for index in range(len(prompts))]


def assert_same(got: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-5, ties: float = 1e-4) -> int:
    """The law in float32: equal tokens, logprobs within `tolerance`.

    Where the two best logits differ by less than `ties` the tokens may part; what follows is then not compared. Returns
    how many did.
    """
    parted = 0
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        a, b = one.outputs[0], other.outputs[0]
        assert len(a.token_ids) == len(
            b.token_ids), f"request {index}: {len(a.token_ids)} and {len(b.token_ids)} tokens"
        for place, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            mine, theirs = a.logprobs[place], b.logprobs[place]
            where = (
                f"request {index}, token {place}: {x} of {mine}, expected {y} of {theirs}; tokens {list(a.token_ids)}, "
                f"expected {list(b.token_ids)}")
            if x == y:
                assert abs(mine[x].logprob - theirs[y].logprob) < tolerance, where
                continue
            assert y in mine and x in theirs, where
            assert max(abs(mine[x].logprob - mine[y].logprob), abs(theirs[x].logprob - theirs[y].logprob)) < ties, where
            parted += 1
            break
    return parted


def environment() -> dict[str, str]:
    """Variables of a child process that runs an engine."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
