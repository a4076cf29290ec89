"""The recurrence token by token in float32: the truth that back ends are compared with."""
from collections.abc import Sequence

import torch

from vllm.overlay.kernels.rows import Capture, captures_by_row


def gate(a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor,
         dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `gate`."""
    x = a.float() + dt_bias.float()
    softplus = x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))
    return -torch.exp(A_log.float()) * softplus, 1 / (1 + torch.exp(-b.float()))


def gated_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                     recurrent: torch.Tensor, live_slots: torch.Tensor, query_start_loc: Sequence[int],
                     num_prefills: int, captures: Sequence[Capture], context_lens: Sequence[int]) -> torch.Tensor:
    """See the package's `gated_delta_rule`. The result does not depend on `context_lens`."""
    heads, key_dim = v.shape[1], q.shape[2]
    q, k, v = _normalised(q) * key_dim**-0.5, _normalised(k), v.float()
    q = q.repeat_interleave(heads // q.shape[1], dim=1)
    k = k.repeat_interleave(heads // k.shape[1], dim=1)
    out = torch.empty_like(v)
    wanted = captures_by_row(captures, query_start_loc)
    for row, slot in enumerate(live_slots.tolist()):
        start, end = query_start_loc[row], query_start_loc[row + 1]
        state = recurrent[slot].clone()
        for t in range(start, end):
            state = state * torch.exp(g[t])[:, None, None]
            predicted = (state * k[t][:, :, None]).sum(1)
            written = beta[t][:, None] * (v[t] - predicted)
            state = state + k[t][:, :, None] * written[:, None, :]
            out[t] = (state * q[t][:, :, None]).sum(1)
            for offset, target in wanted[row]:
                if offset == t - start + 1:
                    recurrent[target] = state
        recurrent[slot] = state
    return out


def _normalised(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
