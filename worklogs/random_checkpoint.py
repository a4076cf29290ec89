"""Writes a checkpoint of random weights for a Qwen3.5-type configuration: config.json and one model.safetensors.

Needs numpy and torch only. The file is streamed, so memory stays at one block of values however large the model is.
The same configuration and seed give the same bytes; each tensor has its own random stream, so leaving layers out
changes no other tensor. Language model and vision tower, joined experts, in the names of the published checkpoints.
"""
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

BLOCK_VALUES = 1 << 22
# dtype, its name in the file, bytes
DTYPES = {
    "bfloat16": (torch.bfloat16, "BF16", 2),
    "float16": (torch.float16, "F16", 2),
    "float32": (torch.float32, "F32", 4),
}

# (random stream, count) -> that many values, float32
Fill = Callable[[np.random.Generator, int], np.ndarray]
# (name, index of the block's first row, block [rows, last dimension]) -> None; may change the block
Adjust = Callable[[str, int, np.ndarray], None]


class Spec(NamedTuple):
    """One tensor to write."""
    name: str
    shape: tuple[int, ...]
    fill: Fill


class CannotWrite(Exception):
    """The checkpoint cannot be made; the message is one line for the user."""


def tensors(config: dict[str, Any]) -> Iterator[Spec]:
    """The tensors of `config` (the parsed config.json, with or without text_config).

    The values keep every part of the model alive: projections of unit gain, norms near 1, and decays between a few
    tokens and a thousand, so that an error in any of them shows in the output.
    """
    text = config.get("text_config", config)
    prefix = "model.language_model" if "text_config" in config else "model"
    hidden, vocabulary, head = text["hidden_size"], text["vocab_size"], text["head_dim"]
    yield Spec(f"{prefix}.embed_tokens.weight", (vocabulary, hidden), _normal(2 * hidden**-0.5))
    for layer, kind in enumerate(layer_types(text)):
        name = f"{prefix}.layers.{layer}"
        yield Spec(f"{name}.input_layernorm.weight", (hidden, ), _normal(0.1))
        yield from _full_attention(f"{name}.self_attn", text, head) if kind == "full_attention" else \
            _gated_delta_net(f"{name}.linear_attn", text)
        yield Spec(f"{name}.post_attention_layernorm.weight", (hidden, ), _normal(0.1))
        yield from _experts(f"{name}.mlp", text) if "num_experts" in text else \
            _swiglu(f"{name}.mlp", hidden, text["intermediate_size"])
    yield Spec(f"{prefix}.norm.weight", (hidden, ), _normal(0.1))
    if not config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)):
        yield _matrix("lm_head", vocabulary, hidden, gain=2.0)
    if config.get("vision_config"):
        yield from _vision_tower("model.visual", config["vision_config"])


def layer_types(text: dict[str, Any]) -> list[str]:
    """Per layer "linear_attention" or "full_attention"."""
    if text.get("layer_types"):
        return text["layer_types"]
    return ["linear_attention" if (layer + 1) % text["full_attention_interval"] else "full_attention"
            for layer in range(text["num_hidden_layers"])]


def write_checkpoint(out: Path, config: dict[str, Any], seed: int, adjust: Adjust | None = None,
                     json_files: dict[str, Any] | None = None,
                     copied_files: dict[str, Path] | None = None) -> tuple[int, str]:
    """Makes folder `out`, which must not exist or be empty, with config.json and model.safetensors, and beside them
    `json_files` (name -> value) and `copied_files` (name -> source). The folder appears only when it is complete.

    Returns:
        bytes and SHA-256 (hex) of model.safetensors.

    Raises:
        CannotWrite: the folder is in use, the disk too small, the dtype unknown.
    """
    text = config.get("text_config", config)
    if text["dtype"] not in DTYPES:
        raise CannotWrite(f"dtype {text['dtype']!r} is none of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CannotWrite(f"{out} exists and is not an empty folder; name another one or remove it")
    specs = list(tensors(config))
    size = sum(_count(spec.shape) for spec in specs) * DTYPES[text["dtype"]][2]
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if size > free:
        raise CannotWrite(f"the checkpoint needs {size / 1e9:.2f} GB and {parent} has {free / 1e9:.2f} GB left")
    partial = parent / f".{out.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        with open(partial / "model.safetensors", "wb") as file:
            total, digest = _write_safetensors(file, specs, text["dtype"], seed, adjust)
        for name, value in {"config.json": config, **(json_files or {})}.items():
            (partial / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        for name, source in (copied_files or {}).items():
            shutil.copyfile(source, partial / name)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return total, digest


def _write_safetensors(file: BinaryIO, specs: list[Spec], dtype: str, seed: int,
                       adjust: Adjust | None) -> tuple[int, str]:
    torch_dtype, code, width = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + _count(spec.shape) * width
        header[spec.name] = {"dtype": code, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    for data in _chain(len(encoded).to_bytes(8, "little") + encoded, specs, torch_dtype, seed, adjust):
        file.write(data)
        digest.update(data)
    return 8 + len(encoded) + offset, digest.hexdigest()


def _chain(start: bytes, specs: list[Spec], dtype: torch.dtype, seed: int, adjust: Adjust | None) -> Iterator[Any]:
    yield start
    for spec in specs:
        name_seed = int.from_bytes(hashlib.sha256(spec.name.encode()).digest()[:8], "little")
        stream = np.random.Generator(np.random.PCG64([seed, name_seed]))
        columns = spec.shape[-1]
        rows = _count(spec.shape) // columns
        step = max(1, BLOCK_VALUES // columns)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            block = spec.fill(stream, count * columns).reshape(count, columns)
            if adjust is not None:
                adjust(spec.name, first, block)
            yield memoryview(torch.from_numpy(block).to(dtype).contiguous().view(torch.uint8).numpy()).cast("B")


def _gated_delta_net(name: str, text: dict[str, Any]) -> Iterator[Spec]:
    hidden, width = text["hidden_size"], text["linear_conv_kernel_dim"]
    heads = text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    yield Spec(f"{name}.A_log", (heads, ), lambda stream, count: np.log(_uniform(stream, count, 1.0, 16.0)))
    yield Spec(f"{name}.dt_bias", (heads, ), _time_step_bias)
    yield Spec(f"{name}.conv1d.weight", (2 * keys + values, 1, width), _normal(width**-0.5))
    yield _matrix(f"{name}.in_proj_qkv", 2 * keys + values, hidden)
    yield _matrix(f"{name}.in_proj_z", values, hidden)
    yield _matrix(f"{name}.in_proj_b", heads, hidden)
    yield _matrix(f"{name}.in_proj_a", heads, hidden)
    around_zero = _normal(0.1)
    yield Spec(f"{name}.norm.weight", (text["linear_value_head_dim"], ),
               lambda stream, count: 1 + around_zero(stream, count))
    yield _matrix(f"{name}.out_proj", hidden, values)


def _full_attention(name: str, text: dict[str, Any], head: int) -> Iterator[Spec]:
    hidden, heads, kv_heads = text["hidden_size"], text["num_attention_heads"], text["num_key_value_heads"]
    sizes = (("q", 2 * heads * head, hidden), ("k", kv_heads * head, hidden), ("v", kv_heads * head, hidden),
             ("o", hidden, heads * head))
    for letter, outputs, inputs in sizes:
        yield _matrix(f"{name}.{letter}_proj", outputs, inputs)
        if text.get("attention_bias"):
            yield Spec(f"{name}.{letter}_proj.bias", (outputs, ), _normal(0.1))
    yield Spec(f"{name}.q_norm.weight", (head, ), _normal(0.1))
    yield Spec(f"{name}.k_norm.weight", (head, ), _normal(0.1))


def _experts(name: str, text: dict[str, Any]) -> Iterator[Spec]:
    hidden, count, inner = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    yield _matrix(f"{name}.gate", count, hidden)
    yield Spec(f"{name}.experts.gate_up_proj", (count, 2 * inner, hidden), _normal(hidden**-0.5))
    yield Spec(f"{name}.experts.down_proj", (count, hidden, inner), _normal(inner**-0.5))
    yield from _swiglu(f"{name}.shared_expert", hidden, text["shared_expert_intermediate_size"])
    yield _matrix(f"{name}.shared_expert_gate", 1, hidden)


def _swiglu(name: str, hidden: int, inner: int) -> Iterator[Spec]:
    yield _matrix(f"{name}.gate_proj", inner, hidden)
    yield _matrix(f"{name}.up_proj", inner, hidden)
    yield _matrix(f"{name}.down_proj", hidden, inner)


def _vision_tower(name: str, vision: dict[str, Any]) -> Iterator[Spec]:
    hidden, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    patch = (vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    merged = hidden * vision["spatial_merge_size"]**2
    yield Spec(f"{name}.patch_embed.proj.weight", (hidden, *patch), _normal(_count(patch)**-0.5))
    yield Spec(f"{name}.patch_embed.proj.bias", (hidden, ), _normal(0.1))
    yield Spec(f"{name}.pos_embed.weight", (vision["num_position_embeddings"], hidden), _normal(1.0))
    for layer in range(vision["depth"]):
        block = f"{name}.blocks.{layer}"
        yield from _layer_norm(f"{block}.norm1", hidden)
        yield from _biased(f"{block}.attn.qkv", 3 * hidden, hidden)
        yield from _biased(f"{block}.attn.proj", hidden, hidden)
        yield from _layer_norm(f"{block}.norm2", hidden)
        yield from _biased(f"{block}.mlp.linear_fc1", inner, hidden)
        yield from _biased(f"{block}.mlp.linear_fc2", hidden, inner)
    yield from _layer_norm(f"{name}.merger.norm", hidden)
    yield from _biased(f"{name}.merger.linear_fc1", merged, merged)
    # Embeddings of pictures as large as those of words.
    yield from _biased(f"{name}.merger.linear_fc2", out, merged, gain=2 * out**-0.5)


def _layer_norm(name: str, size: int) -> Iterator[Spec]:
    around_zero = _normal(0.1)
    yield Spec(f"{name}.weight", (size, ), lambda stream, count: 1 + around_zero(stream, count))
    yield Spec(f"{name}.bias", (size, ), around_zero)


def _biased(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Iterator[Spec]:
    yield _matrix(name, outputs, inputs, gain)
    yield Spec(f"{name}.bias", (outputs, ), _normal(0.1 * gain))


def _matrix(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Spec:
    return Spec(f"{name}.weight", (outputs, inputs), _normal(gain * inputs**-0.5))


def _normal(deviation: float) -> Fill:
    return lambda stream, count: stream.standard_normal(count, dtype=np.float32) * np.float32(deviation)


def _uniform(stream: np.random.Generator, count: int, low: float, high: float) -> np.ndarray:
    return np.float32(low) + stream.random(count, dtype=np.float32) * np.float32(high - low)


def _time_step_bias(stream: np.random.Generator, count: int) -> np.ndarray:
    """Inverse softplus of time steps that are log-uniform between 0.001 and 0.1, as Mamba starts them."""
    steps = np.exp(_uniform(stream, count, float(np.log(1e-3)), float(np.log(1e-1))))
    return steps + np.log(-np.expm1(-steps))


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
