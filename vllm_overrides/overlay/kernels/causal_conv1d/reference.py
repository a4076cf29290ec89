"""The convolution token by token in float32: the truth that back ends are compared with."""
from collections.abc import Sequence

import torch

from vllm.overlay.kernels.rows import Capture, captures_by_row


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, conv: torch.Tensor,
                  live_slots: torch.Tensor, query_start_loc: Sequence[int], num_prefills: int,
                  captures: Sequence[Capture]) -> torch.Tensor:
    """See the package's `causal_conv1d`."""
    width = weight.shape[1]
    out = torch.empty_like(x)
    wanted = captures_by_row(captures, query_start_loc)
    for row, slot in enumerate(live_slots.tolist()):
        start, end = query_start_loc[row], query_start_loc[row + 1]
        history = [conv[slot, :, i].clone() for i in range(width - 1)]
        for t in range(start, end):
            history.append(x[t])
            y = torch.zeros_like(x[t], dtype=torch.float32) if bias is None else bias.float()
            for j in range(width):
                y = y + weight[:, j].float() * history[len(history) - width + j].float()
            out[t] = (y / (1 + torch.exp(-y))).to(x.dtype)
            for offset, target in wanted[row]:
                if offset == t - start + 1:
                    _store(conv[target], history)
        _store(conv[slot], history)
    return out


def _store(tail: torch.Tensor, history: Sequence[torch.Tensor]) -> None:
    size = tail.shape[1]
    for i in range(size):
        tail[:, i] = history[len(history) - size + i]
