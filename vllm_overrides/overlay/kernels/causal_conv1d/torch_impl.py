"""The convolution in vectorised PyTorch: a loop over prefill rows, one step for all decode rows."""
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vllm.overlay.kernels.blocks import row_blocks
from vllm.overlay.kernels.rows import Capture, captures_by_row


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, conv: torch.Tensor,
                  live_slots: torch.Tensor, query_start_loc: Sequence[int], num_prefills: int,
                  captures: Sequence[Capture]) -> torch.Tensor:
    """See the package's `causal_conv1d`."""
    size = conv.shape[2]
    kernel = weight.float()
    taps = kernel.t().contiguous() if num_prefills else kernel
    offset = None if bias is None else bias.float()
    out = torch.empty_like(x)
    wanted = captures_by_row(captures, query_start_loc)
    for row in range(num_prefills):
        start, end = query_start_loc[row], query_start_loc[row + 1]
        if start == end:
            continue
        slot = live_slots[row:row + 1]
        before = conv.index_select(0, slot)[0].t().to(x.dtype)
        history = torch.cat((before, x[start:end]))
        _convolve(history, taps, offset, out[start:end])
        for after, target in wanted[row]:
            conv[target] = history[after:after + size].t()
        conv.index_copy_(0, slot, history[end - start:].t().unsqueeze(0).to(conv.dtype))
    if num_prefills < live_slots.shape[0]:
        start = query_start_loc[num_prefills]
        slots = live_slots[num_prefills:]
        history = torch.cat((conv.index_select(0, slots).to(x.dtype), x[start:].unsqueeze(2)), dim=2)
        summed = (history.float() * kernel).sum(2)
        out[start:] = F.silu(summed if offset is None else summed + offset).to(x.dtype)
        conv.index_copy_(0, slots, history[:, :, 1:].to(conv.dtype))
        for row in range(num_prefills, live_slots.shape[0]):
            for _, target in wanted[row]:
                conv[target] = history[row - num_prefills, :, 1:]
    return out


def _convolve(history: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """history [W - 1 + n, C] -> out [n, C]; taps [W, C] float32."""
    for block in row_blocks(out.shape[0], out.shape[1], out.device):
        size = block.stop - block.start
        inputs = history[block.start:block.stop + taps.shape[0] - 1].float()
        total = inputs[:size] * taps[0] if bias is None else torch.addcmul(bias, inputs[:size], taps[0])
        for tap in range(1, taps.shape[0]):
            total.addcmul_(inputs[tap:tap + size], taps[tap])
        out[block] = F.silu(total)
