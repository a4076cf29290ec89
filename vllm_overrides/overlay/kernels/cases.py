"""The cases of `python -m vllm.overlay.selftest`: small inputs for every operator, odd sizes among them.

A case builds its inputs on the CPU from a seeded generator and runs one back end over them. What an operator must not
read (free slots, cache positions past a sequence's end) holds NaN.
"""
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from vllm.overlay.kernels import (
    causal_conv1d,
    gated_delta_rule,
    int8_weights,
    linear,
    moe,
    norms,
    paged_attention,
    rope,
    sampling,
    token_mask,
    vision_attention,
)
from vllm.overlay.kernels.backend import Backends

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Largest difference relative to the largest magnitude. Float32: sums in another order. The others: one rounding of the
# result, which may fall to the other side (2^-8, 2^-11), with room for a rounded intermediate.
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
# For results that stay float32 whatever the inputs are.
KEPT = dict.fromkeys(FLOATS, 2e-5)
EXACT = dict.fromkeys(FLOATS, 0.0)
NAN = float("nan")

Inputs = dict[str, Any]
Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One operator on one kind of input. tolerance: output -> dtype -> largest relative error."""
    op: str
    name: str
    backends: Backends
    build: Callable[[torch.Generator, torch.dtype], Inputs]
    run: Callable[[ModuleType, Inputs], Outputs]
    tolerance: dict[str, dict[torch.dtype, float]]
    dtypes: tuple[torch.dtype, ...] = FLOATS


def _normal(gen: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=gen).to(dtype)


def _starts(lengths: list[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def _pool(gen: torch.Generator, dtype: torch.dtype, slots: int, live: list[int], *shape: int) -> torch.Tensor:
    pool = torch.full((slots, *shape), NAN, dtype=dtype)
    pool[live] = _normal(gen, dtype, len(live), *shape)
    return pool


def _written(pool: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """The slots that hold results; the poison elsewhere would make every comparison fail."""
    return pool[slots]


def _delta(lengths: list[int], prefills: int, context_lens: list[int], captures: tuple[tuple[int, int, int], ...],
           key_heads: int, heads: int, key: int, value: int) -> Callable[[torch.Generator, torch.dtype], Inputs]:

    def build(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
        starts, rows = _starts(lengths), len(lengths)
        tokens = starts[-1]
        live = list(range(rows, 0, -1))
        g, beta = gated_delta_rule.backends.load("reference").gate(
            4 * _normal(gen, torch.float32, tokens, heads), _normal(gen, torch.float32, tokens, heads),
            _normal(gen, torch.float32, heads), _normal(gen, torch.float32, heads))
        return {
            "q": _normal(gen, dtype, tokens, key_heads, key),
            "k": _normal(gen, dtype, tokens, key_heads, key),
            "v": _normal(gen, dtype, tokens, heads, value),
            "g": g,
            "beta": beta,
            "recurrent": _pool(gen, torch.float32, rows + len(captures) + 2, live, heads, key, value),
            "live_slots": torch.tensor(live),
            "query_start_loc": starts,
            "num_prefills": prefills,
            "captures": captures,
            "context_lens": context_lens,
        }

    return build


def _run_delta(module: ModuleType, inputs: Inputs) -> Outputs:
    out = module.gated_delta_rule(**inputs)
    slots = inputs["live_slots"].tolist() + [slot for _, _, slot in inputs["captures"]]
    return {"o": out, "state": _written(inputs["recurrent"], slots)}


def _gate(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
    return {
        "a": 8 * _normal(gen, dtype, 70, 6),
        "b": 4 * _normal(gen, dtype, 70, 6),
        "A_log": _normal(gen, torch.float32, 6),
        "dt_bias": _normal(gen, torch.float32, 6)
    }


def _conv(lengths: list[int], prefills: int, captures: tuple[tuple[int, int, int], ...], channels: int, width: int,
          with_bias: bool) -> Callable[[torch.Generator, torch.dtype], Inputs]:

    def build(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
        starts, rows = _starts(lengths), len(lengths)
        live = list(range(rows, 0, -1))
        return {
            "x": _normal(gen, dtype, starts[-1], channels),
            "weight": _normal(gen, dtype, channels, width),
            "bias": _normal(gen, dtype, channels) if with_bias else None,
            "conv": _pool(gen, dtype, rows + len(captures) + 2, live, channels, width - 1),
            "live_slots": torch.tensor(live),
            "query_start_loc": starts,
            "num_prefills": prefills,
            "captures": captures,
        }

    return build


def _run_conv(module: ModuleType, inputs: Inputs) -> Outputs:
    out = module.causal_conv1d(**inputs)
    slots = inputs["live_slots"].tolist() + [slot for _, _, slot in inputs["captures"]]
    return {"y": out, "tail": _written(inputs["conv"], slots)}


def _attention(context: list[int], lengths: list[int], heads: int, kv_heads: int, size: int,
               block_size: int) -> Callable[[torch.Generator, torch.dtype], Inputs]:

    def build(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
        starts = _starts(lengths)
        seq_lens = [before + piece for before, piece in zip(context, lengths, strict=True)]
        needed = [-(-total // block_size) for total in seq_lens]
        order = torch.randperm(sum(needed) + 3, generator=gen).tolist()
        key_cache = torch.full((len(order), block_size, kv_heads, size), NAN, dtype=dtype)
        value_cache = key_cache.clone()
        tables = torch.full((len(lengths), max(needed) + 1), -7)
        for row, total in enumerate(seq_lens):
            blocks = [order.pop() for _ in range(needed[row])]
            tables[row, :len(blocks)] = torch.tensor(blocks)
            for cache in (key_cache, value_cache):
                rows = torch.full((len(blocks) * block_size, kv_heads, size), NAN, dtype=dtype)
                rows[:total] = _normal(gen, dtype, total, kv_heads, size)
                cache[blocks] = rows.view(-1, block_size, kv_heads, size)
        return {
            "q": _normal(gen, dtype, starts[-1], heads, size),
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_tables": tables,
            "query_start_loc": starts,
            "seq_lens": seq_lens,
            "scale": size**-0.5,
        }

    return build


def _pictures(lengths: list[int], heads: int, size: int) -> Callable[[torch.Generator, torch.dtype], Inputs]:

    def build(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
        borders = _starts(lengths)
        q, k, v = 2 * _normal(gen, dtype, 3, borders[-1], heads, size)
        return {"q": q, "k": k, "v": v, "cu_seqlens": borders, "scale": size**-0.5}

    return build


def _write(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
    return {
        "k": _normal(gen, dtype, 9, 3, 10),
        "v": _normal(gen, dtype, 9, 3, 10),
        "key_cache": torch.zeros(5, 4, 3, 10, dtype=dtype),
        "value_cache": torch.zeros(5, 4, 3, 10, dtype=dtype),
        "slot_mapping": torch.randperm(20, generator=gen)[:9],
    }


def _run_write(module: ModuleType, inputs: Inputs) -> Outputs:
    module.write_kv(**inputs)
    return {"key_cache": inputs["key_cache"], "value_cache": inputs["value_cache"]}


def _experts(tokens: int, count: int, top_k: int, hidden: int, inner: int,
             only: int) -> Callable[[torch.Generator, torch.dtype], Inputs]:

    def build(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
        logits = torch.randn(tokens, count, generator=gen)
        logits[:, only:] = -float("inf")
        weights, ids = moe.backends.load("reference").route(logits, top_k, True)
        return {
            "x": _normal(gen, dtype, tokens, hidden),
            "w13": _normal(gen, dtype, count, 2 * inner, hidden) * hidden**-0.5,
            "w2": _normal(gen, dtype, count, hidden, inner) * inner**-0.5,
            "weights": weights,
            "ids": ids,
        }

    return build


def _matrix(tokens: int, rows: int, columns: int,
            with_bias: bool) -> Callable[[torch.Generator, torch.dtype], Inputs]:

    def build(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
        return {"x": _normal(gen, dtype, tokens, columns), "weight": _normal(gen, dtype, rows, columns) * columns**-0.5,
                "bias": _normal(gen, dtype, rows) if with_bias else None}

    return build


def _int8_matrix(rows: int, columns: int, with_bias: bool) -> Callable[[torch.Generator, torch.dtype], Inputs]:

    def build(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
        weight, scale = int8_weights.quantise(torch.randn(rows, columns, generator=gen) * columns**-0.5)
        return {"x": _normal(gen, dtype, 9, columns), "weight": weight, "scale": scale,
                "bias": _normal(gen, dtype, rows) if with_bias else None}

    return build


def _int8_experts(tokens: int, count: int, top_k: int, hidden: int, inner: int,
                  only: int) -> Callable[[torch.Generator, torch.dtype], Inputs]:
    plain = _experts(tokens, count, top_k, hidden, inner, only)

    def build(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
        inputs = plain(gen, dtype)
        for weight, scale in (("w13", "s13"), ("w2", "s2")):
            inputs[weight], inputs[scale] = int8_weights.quantise(inputs[weight])
        return inputs

    return build


def _packed_linear(module: ModuleType, inputs: Inputs) -> Outputs:
    return {"y": module.linear(inputs["x"], module.pack(inputs["weight"].clone()), inputs["bias"])}


def _packed_experts(module: ModuleType, inputs: Inputs) -> Outputs:
    w13, w2 = module.pack(inputs["w13"].clone(), inputs["w2"].clone())
    return {"y": module.experts(inputs["x"], w13, w2, inputs["weights"], inputs["ids"])}


def _packed_int8(module: ModuleType, inputs: Inputs) -> Outputs:
    weight = module.pack(inputs["weight"].clone(), inputs["weight"].shape[0], inputs["x"].dtype)
    return {"y": module.int8_linear(inputs["x"], weight, inputs["scale"], inputs["bias"])}


def _run_route(module: ModuleType, inputs: Inputs) -> Outputs:
    weights, ids = module.route(**inputs)
    return {"weights": weights, "ids": ids}


def _run_rms(module: ModuleType, inputs: Inputs) -> Outputs:
    normed, total = module.rms_norm(**inputs)
    head = module.rms_norm(inputs["x"], inputs["weight"], inputs["eps"], None, False)
    return {"normed": normed, "sum": total, "plain": head}


def _rope(sections: tuple[int, int, int] | None) -> Callable[[torch.Generator, torch.dtype], Inputs]:

    def build(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
        positions = torch.randint(0, 262144, (3, 11) if sections else (11, ), generator=gen)
        rotation = rope.RotaryTable(64, 1e7, sections)(positions)
        return {
            "q": _normal(gen, dtype, 11, 5, 256),
            "k": _normal(gen, dtype, 11, 1, 256),
            "cos": rotation.cos,
            "sin": rotation.sin
        }

    return build


def _run_rope(module: ModuleType, inputs: Inputs) -> Outputs:
    q, k = module.apply_rope(**inputs)
    return {"q": q, "k": k}


def _filters(vocab: int, ties: bool) -> Callable[[torch.Generator, torch.dtype], Inputs]:

    def build(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
        logits = 3 * torch.randn(12, vocab, generator=gen)
        k = torch.randint(1, 60, (12, ), generator=gen)
        k[::4] = vocab
        p = torch.rand(12, generator=gen)
        p[::3] = 1
        return {"logits": (2 * logits).round() / 2 if ties else logits, "p": p, "k": k, "min_p": p / 10}

    return build


def _run_filters(module: ModuleType, inputs: Inputs) -> Outputs:
    logits = inputs["logits"]
    filtered = module.apply_top_k_top_p(logits, inputs["p"], inputs["k"])
    return {
        "greedy": module.greedy(logits),
        "top_k_top_p": filtered.masked_fill(filtered.isinf(), -1e4),
        "min_p": module.apply_min_p(logits, inputs["min_p"]).clamp_min(-1e4),
    }


def _masks(vocab: int, words: int, rows: list[int]) -> Callable[[torch.Generator, torch.dtype], Inputs]:

    def build(gen: torch.Generator, dtype: torch.dtype) -> Inputs:
        mask = torch.randint(-2**31, 2**31, (len(rows), words), generator=gen).int()
        mask[:, ::3] = 0
        return {"logits": _normal(gen, dtype, max(rows) + 2, vocab), "mask": mask, "rows": rows}

    return build


def _run_masks(module: ModuleType, inputs: Inputs) -> Outputs:
    module.apply_token_mask(**inputs)
    return {"logits": inputs["logits"].clamp_min(-1e4)}


def _one(function: str, output: str) -> Callable[[ModuleType, Inputs], Outputs]:
    return lambda module, inputs: {output: getattr(module, function)(**inputs)}


def all_cases() -> list[Case]:
    """Every case, in the order in which the self test prints them."""
    delta = {"o": KEPT, "state": KEPT}
    conv = {"y": ROUNDED, "tail": EXACT}
    filters = {"greedy": EXACT, "top_k_top_p": EXACT, "min_p": EXACT}
    return [
        Case("gated_delta_rule", "gate", gated_delta_rule.backends, _gate,
             lambda module, inputs: dict(zip(("g", "beta"), module.gate(**inputs), strict=True)),
             {"g": KEPT, "beta": KEPT}),
        Case("gated_delta_rule", "mixed rows, odd heads", gated_delta_rule.backends,
             _delta([0, 5, 1, 150, 64, 2, 1, 1], 6, [0, 130, 64, 37, 128, 63, 9, 0],
                    ((1, 3, 9), (3, 27, 10), (3, 91, 11), (3, 100, 12), (4, 64, 13), (6, 1, 14)), 3, 9, 20, 12),
             _run_delta, delta),
        Case("gated_delta_rule", "heads of the 35B model at TP 4", gated_delta_rule.backends,
             _delta([200, 1], 1, [0, 7], ((0, 128, 3), (0, 199, 4)), 4, 8, 128, 128), _run_delta, delta),
        Case("causal_conv1d", "mixed rows", causal_conv1d.backends,
             _conv([0, 7, 1, 2, 40, 1, 1], 5, ((1, 1, 8), (1, 6, 9), (2, 1, 10), (3, 1, 11), (5, 1, 12)), 37, 4, False),
             _run_conv, conv),
        Case("causal_conv1d", "bias, width 3", causal_conv1d.backends, _conv([9, 1], 1, (), 5, 3, True), _run_conv,
             conv),
        Case("moe", "router, 256 experts", moe.backends,
             lambda gen, dtype: {"router_logits": torch.randn(65, 256, generator=gen), "top_k": 8, "renormalize": True},
             _run_route, {"weights": KEPT, "ids": EXACT}, (torch.float32, )),
        Case("moe", "prefill, experts without tokens", moe.backends, _experts(50, 11, 3, 48, 20, 7),
             _one("experts", "y"), {"y": ROUNDED}),
        Case("moe", "decode", moe.backends, _experts(3, 16, 4, 96, 40, 16), _one("experts", "y"), {"y": ROUNDED}),
        Case("moe", "packed", moe.backends, _experts(50, 11, 3, 64, 32, 7), _packed_experts, {"y": ROUNDED}),
        Case("linear", "one row, bias", linear.backends, _matrix(1, 515, 1001, True),
             lambda module, inputs: {"y": module.linear(**inputs)}, {"y": ROUNDED}),
        Case("linear", "few rows, odd sizes", linear.backends, _matrix(7, 37, 43, False),
             lambda module, inputs: {"y": module.linear(**inputs)}, {"y": ROUNDED}),
        Case("linear", "many rows", linear.backends, _matrix(70, 64, 96, True),
             lambda module, inputs: {"y": module.linear(**inputs)}, {"y": ROUNDED}),
        Case("linear", "packed, few rows", linear.backends, _matrix(5, 96, 516, True), _packed_linear, {"y": ROUNDED}),
        Case("linear", "packed, many rows", linear.backends, _matrix(70, 64, 96, False), _packed_linear,
             {"y": ROUNDED}),
        Case("int8_weights", "several tiles, bias", int8_weights.backends, _int8_matrix(600, 1000, True),
             _one("int8_linear", "y"), {"y": ROUNDED}),
        Case("int8_weights", "one odd tile", int8_weights.backends, _int8_matrix(7, 33, False),
             _one("int8_linear", "y"), {"y": ROUNDED}),
        Case("int8_weights", "prefill, experts without tokens", int8_weights.backends,
             _int8_experts(50, 11, 3, 48, 20, 7), _one("int8_experts", "y"), {"y": ROUNDED}),
        Case("int8_weights", "decode", int8_weights.backends, _int8_experts(3, 16, 4, 96, 40, 16),
             _one("int8_experts", "y"), {"y": ROUNDED}),
        Case("int8_weights", "packed", int8_weights.backends, _int8_matrix(64, 300, True), _packed_int8,
             {"y": ROUNDED}),
        Case("paged_attention", "write", paged_attention.backends, _write, _run_write,
             {"key_cache": EXACT, "value_cache": EXACT}),
        Case("paged_attention", "mixed rows, head size 256", paged_attention.backends,
             _attention([0, 13, 5, 30, 70], [9, 20, 1, 1, 1], 4, 2, 256, 16), _one("paged_attention", "out"),
             {"out": ROUNDED}),
        Case("paged_attention", "odd sizes", paged_attention.backends,
             _attention([0, 3, 0, 11], [1, 8, 3, 1], 6, 1, 40, 5), _one("paged_attention", "out"), {"out": ROUNDED}),
        Case("vision_attention", "three pictures and an empty one, heads of the 35B model", vision_attention.backends,
             _pictures([36, 0, 4, 90], 16, 72), _one("vision_attention", "out"), {"out": ROUNDED}),
        Case("vision_attention", "several tiles on every device", vision_attention.backends, _pictures([600, 1], 64, 4),
             _one("vision_attention", "out"), {"out": ROUNDED}),
        Case("norms", "residual and plain", norms.backends,
             lambda gen, dtype: {
                 "x": _normal(gen, dtype, 7, 130), "weight": _normal(gen, dtype, 130), "eps": 1e-6,
                 "residual": _normal(gen, dtype, 7, 130), "gemma": True
             }, _run_rms, {"normed": ROUNDED, "sum": ROUNDED, "plain": ROUNDED}),
        Case("norms", "gated", norms.backends,
             lambda gen, dtype: {
                 "o": 1e5 * _normal(gen, torch.float32, 7, 3, 128), "z": _normal(gen, dtype, 7, 3, 128),
                 "weight": _normal(gen, torch.float32, 128), "eps": 1e-6
             }, _one("gated_rms_norm", "y"), {"y": ROUNDED}),
        Case("rope", "angles up to the longest context", rope.backends,
             lambda gen, dtype: {"positions": torch.randint(0, 262144, (3, 99), generator=gen)},
             lambda module, inputs: rope.RotaryTable(64, 1e7, (11, 11, 10))(**inputs)._asdict(),
             {"cos": KEPT, "sin": KEPT}, (torch.float32, )),
        Case("rope", "text", rope.backends, _rope(None), _run_rope, {"q": ROUNDED, "k": ROUNDED}),
        Case("rope", "interleaved M-RoPE", rope.backends, _rope((11, 11, 10)), _run_rope, {"q": ROUNDED, "k": ROUNDED}),
        Case("sampling", "real vocabulary", sampling.backends, _filters(248320, False), _run_filters, filters,
             (torch.float32, )),
        Case("sampling", "many ties", sampling.backends, _filters(500, True), _run_filters, filters, (torch.float32, )),
        Case("token_mask", "real vocabulary", token_mask.backends, _masks(248320, 7760, [0, 3]), _run_masks,
             {"logits": EXACT}),
        Case("token_mask", "masks of another width", token_mask.backends, _masks(77, 2, [5, 0, 1, 2]), _run_masks,
             {"logits": EXACT}),
    ]
