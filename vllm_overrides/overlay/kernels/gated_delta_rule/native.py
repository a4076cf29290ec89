"""The gated delta rule in compiled code (csrc/*.cpp): one call for all rows of a step, decode and prefill."""
from array import array
from collections.abc import Sequence
from functools import cache

import torch

from vllm.overlay.kernels import native
from vllm.overlay.kernels.rows import Capture, packed_rows

unavailable, for_this_platform = native.unavailable, native.for_this_platform


@cache
def _functions():
    return (native.function("delta_gate", "iplplppppll"), native.function("gated_delta_rule", "ippppppppppllllll"))


def gate(a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor,
         dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `gate`."""
    if a.dtype != b.dtype:
        a, b = a.float(), b.float()
    if a.stride(1) != 1 or b.stride(1) != 1:
        a, b = a.contiguous(), b.contiguous()
    A_log, dt_bias = A_log.float().contiguous(), dt_bias.float().contiguous()
    g, beta = A_log.new_empty(*a.shape), A_log.new_empty(*a.shape)
    _functions()[0](native.DTYPES[a.dtype], a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), A_log.data_ptr(),
                    dt_bias.data_ptr(), g.data_ptr(), beta.data_ptr(), *a.shape)
    return g, beta


def gated_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                     recurrent: torch.Tensor, live_slots: torch.Tensor, query_start_loc: Sequence[int],
                     num_prefills: int, captures: Sequence[Capture], context_lens: Sequence[int]) -> torch.Tensor:
    """See the package's `gated_delta_rule`."""
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = q.float(), k.float(), v.float()
    q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    if not q_strides[2] == k_strides[2] == v_strides[2] == 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    g, beta = g.contiguous(), beta.contiguous()
    out = g.new_empty(*v.shape)
    strides = array("q", (*q_strides[:2], *k_strides[:2], *v_strides[:2]))
    contexts = array("q", context_lens)
    packed = packed_rows(query_start_loc, live_slots.tolist(), captures, recurrent.shape[0])
    _functions()[1](native.DTYPES[q.dtype], q.data_ptr(), k.data_ptr(), v.data_ptr(), strides.buffer_info()[0],
                    g.data_ptr(), beta.data_ptr(), recurrent.data_ptr(), out.data_ptr(), contexts.buffer_info()[0],
                    packed.buffer_info()[0], live_slots.shape[0], len(captures), q.shape[1], *recurrent.shape[1:])
    return out
