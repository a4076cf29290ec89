"""Gated delta rule: the recurrence of a Gated DeltaNet layer, chunked for prompts and stepwise for decode.

Per value head, with state S [K, V], and all of it in float32:

    S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - k_t^T S))^T;   o_t = S^T q_t

Source of the rule: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464. README.md has the chunked form.
"""
from collections.abc import Sequence

import torch

from vllm.overlay.kernels.backend import Backends
from vllm.overlay.kernels.rows import Capture, check_rows

CHUNK = 64

backends = Backends("gated_delta_rule", (("native", "native"), ("torch", "torch_impl"), ("reference", "reference")))


def gate(a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor,
         dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay and write strength from their projections.

    Args:
        a, b: [T, HV], any float dtype.
        A_log, dt_bias: [HV], any float dtype.

    Returns:
        float32 g [T, HV] = -exp(A_log) softplus(a + dt_bias), the decay's logarithm, and beta [T, HV] = sigmoid(b).
    """
    return backends.chosen().gate(a, b, A_log, dt_bias)


def gated_delta_rule(q: torch.Tensor,
                     k: torch.Tensor,
                     v: torch.Tensor,
                     g: torch.Tensor,
                     beta: torch.Tensor,
                     recurrent: torch.Tensor,
                     live_slots: torch.Tensor,
                     query_start_loc: Sequence[int],
                     num_prefills: int,
                     captures: Sequence[Capture] = (),
                     context_lens: Sequence[int] | None = None) -> torch.Tensor:
    """Runs the recurrence over a step's tokens and moves each row's state forward in place.

    q and k are raw: they are normalised here to x * rsqrt(sum(x^2) + 1e-6) over K, and q is scaled by K ** -0.5.

    Args:
        q, k: [T, HK, K], float32, bfloat16 or float16.
        v: [T, HV, V], same dtypes. HV is a multiple of HK; value head h reads key head h // (HV // HK).
        g, beta: [T, HV] float32, as `gate` returns them.
        recurrent: [num_slots, HV, K, V] float32, contiguous: this layer's pool. Only the slots named are touched.
        live_slots: LongTensor [N] on the device, all different: the rows' slots.
        query_start_loc: N + 1 host ints; row i is tokens [query_start_loc[i], query_start_loc[i + 1]).
        num_prefills: rows before it may have any length, zero included; the others have exactly one token.
        captures: (row, offset, slot): leave in `slot` the state as it is after `offset` tokens of that row's piece
            (1 <= offset <= length). The slots differ from each other and from all live slots. Any offset is exact; none
            costs a second pass, and one at an absolute multiple of 64 costs a copy.
        context_lens: host ints, per row the absolute position of its first token. Chunks are cut at absolute multiples
            of 64, so that a prompt gives the same chunk products however it is split there. None: every row starts at a
            multiple of 64. Rows without prefill may hold any value.

    Returns:
        o [T, HV, V] float32. A non-finite input reaches its own row only, but there also earlier tokens of its chunk.

    Raises:
        ValueError: head counts, rows or captures that do not fit together.
    """
    tokens, key_heads, _ = q.shape
    if k.shape != q.shape or v.shape[0] != tokens or g.shape != v.shape[:2] or beta.shape != g.shape:
        raise ValueError(f"gated_delta_rule: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, "
                         f"g {tuple(g.shape)}, beta {tuple(beta.shape)}")
    if v.shape[1] % key_heads:
        raise ValueError(f"gated_delta_rule: {v.shape[1]} value heads are no multiple of {key_heads} key heads")
    if recurrent.shape[1:] != (v.shape[1], q.shape[2], v.shape[2]) or recurrent.dtype != torch.float32:
        raise ValueError(f"gated_delta_rule: pool {tuple(recurrent.shape)} {recurrent.dtype} for "
                         f"q {tuple(q.shape)}, v {tuple(v.shape)}; the state is float32")
    check_rows(tokens, live_slots.shape[0], query_start_loc, num_prefills)
    if context_lens is None:
        context_lens = [0] * live_slots.shape[0]
    elif len(context_lens) != live_slots.shape[0]:
        raise ValueError(f"gated_delta_rule: {len(context_lens)} context lengths for {live_slots.shape[0]} rows")
    return backends.chosen().gated_delta_rule(q, k, v, g, beta, recurrent, live_slots, query_start_loc, num_prefills,
                                              captures, context_lens)
