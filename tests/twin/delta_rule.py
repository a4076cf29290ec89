"""The gated delta rule of the training program: delta_rule.c as a torch operator with a gradient."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("delta_rule.c")
HEAD = 64
SPAN = 16


@cache
def library() -> ctypes.CDLL:
    """delta_rule.c, compiled for this machine; kept in the temporary folder under the hash of source and processor."""
    flags = ["-O3", "-march=native", "-mprefer-vector-width=512", "-ffast-math", "-shared", "-fPIC"]
    processor = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join([*flags, processor]).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"twin-delta-rule-{os.getuid()}-{digest}.so"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(partial), "-lm"], check=True)
        partial.rename(path)
    return ctypes.CDLL(str(path))


def _pointers(*tensors: torch.Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    fresh: torch.Tensor,
) -> None:
    if q.shape[-1] != HEAD or v.shape[-1] != HEAD:
        raise ValueError(f"delta_rule.c is for heads of {HEAD}, these have {q.shape[-1]} and {v.shape[-1]}")
    for tensor in (q, k, v, g, beta):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError("delta_rule wants contiguous float32")
    if fresh.dtype != torch.bool or not fresh.is_contiguous():
        raise ValueError("delta_rule wants fresh as contiguous bool")


@torch.library.custom_op("twin::delta_rule", mutates_args=())
def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, fresh: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The readout, and the states that its gradient needs.

    Args:
        q, k: [B, T, HK, 64] float32, normalised, q scaled. v: [B, T, HV, 64]. g (log decay), beta: [B, T, HV].
        fresh: [B, T] bool, true at the first token of a chat.

    Raises:
        ValueError: another dtype or head size.
    """
    _check(q, k, v, g, beta, fresh)
    batch, tokens, keys, _ = q.shape
    heads = v.shape[2]
    out = torch.empty_like(v)
    kept = torch.empty(batch, heads, -(-tokens // SPAN), HEAD, HEAD)
    library().delta_forward(batch, tokens, keys, heads, *_pointers(q, k, v, g, beta, fresh, out, kept))
    return out, kept


@delta_rule.register_fake
def _(q, k, v, g, beta, fresh):
    return torch.empty_like(v), v.new_empty(v.shape[0], v.shape[2], -(-v.shape[1] // SPAN), HEAD, HEAD)


@torch.library.custom_op("twin::delta_rule_backward", mutates_args=())
def delta_rule_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    fresh: torch.Tensor,
    kept: torch.Tensor,
    grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, g and beta; `kept` from the forward pass, grad: that of the readout."""
    grad = grad.contiguous()
    dq, dk, dv, dg, db = torch.zeros_like(q), torch.zeros_like(k), *(torch.empty_like(x) for x in (v, g, beta))
    library().delta_backward(
        q.shape[0],
        q.shape[1],
        q.shape[2],
        v.shape[2],
        *_pointers(q, k, v, g, beta, fresh, kept, grad, dq, dk, dv, dg, db),
    )
    return dq, dk, dv, dg, db


@delta_rule_backward.register_fake
def _(q, k, v, g, beta, fresh, kept, grad):
    return tuple(torch.empty_like(x) for x in (q, k, v, g, beta))


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx, grad, _):
    q, k, v, g, beta, fresh, kept = ctx.saved_tensors
    return (*torch.ops.twin.delta_rule_backward(q, k, v, g, beta, fresh, kept, grad), None)


delta_rule.register_autograd(_backward, setup_context=_setup)
