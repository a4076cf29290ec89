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
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    A_log, dt_bias = A_log.float().contiguous(), dt_bias.float().contiguous()
    g, beta = torch.empty(a.shape, dtype=torch.float32), torch.empty(a.shape, dtype=torch.float32)
    _functions()[0](native.DTYPES[a.dtype], a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), A_log.data_ptr(),
                    dt_bias.data_ptr(), g.data_ptr(), beta.data_ptr(), *a.shape)
    return g, beta


def gated_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                     recurrent: torch.Tensor, live_slots: torch.Tensor, query_start_loc: Sequence[int],
                     num_prefills: int, captures: Sequence[Capture], context_lens: Sequence[int]) -> torch.Tensor:
    """See the package's `gated_delta_rule`."""
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    g, beta = g.contiguous(), beta.contiguous()
    out = torch.empty(v.shape, dtype=torch.float32)
    strides = array("q", (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]))
    contexts = array("q", context_lens)
    packed = packed_rows(query_start_loc, live_slots.tolist(), captures, recurrent.shape[0])
    _functions()[1](native.DTYPES[q.dtype], q.data_ptr(), k.data_ptr(), v.data_ptr(), strides.buffer_info()[0],
                    g.data_ptr(), beta.data_ptr(), recurrent.data_ptr(), out.data_ptr(), contexts.buffer_info()[0],
                    packed.buffer_info()[0], live_slots.shape[0], len(captures), q.shape[1], v.shape[1], *recurrent.shape[2:])
    return out
