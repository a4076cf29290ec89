"""Products with int8 weights in PyTorch: tiles of them in the activations' dtype, then a plain product."""
from typing import cast

import torch
import torch.nn.functional as F

from vllm.overlay.kernels.moe import torch_impl as moe

# Elements of a tile: on a CPU it stays in the second-level cache, elsewhere it is large enough to hide launches.
_TILE_CPU = 1 << 18
_TILE = 1 << 24


def pack(weight: torch.Tensor, part: int, operand: torch.dtype) -> torch.Tensor:
    """See the package's `pack`: rows are best."""
    return weight


def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See the package's `int8_linear`."""
    rows, columns = weight.shape
    step = max(1, (_TILE_CPU if x.device.type == "cpu" else _TILE) // max(1, columns))
    out = x.new_empty(*x.shape[:-1], rows)
    for at in range(0, rows, step):
        tile = slice(at, min(at + step, rows))
        if x.dtype == torch.float16:
            # Sums of products with integers leave its range.
            y = F.linear(x, restored(weight[tile], scale[tile], x.dtype)).float()
        else:
            y = F.linear(x, weight[tile].to(x.dtype)).float().mul_(scale[tile])
        out[..., tile] = y if bias is None else y.add_(bias[tile])
    return out


def int8_experts(x: torch.Tensor, w13: torch.Tensor, s13: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor,
                 weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """See the package's `int8_experts`. The tile is an expert, or the experts that a batched product gathers."""
    both, down = _Restored(w13, s13, x.dtype), _Restored(w2, s2, x.dtype)
    return moe.experts(x, cast(torch.Tensor, both), cast(torch.Tensor, down), weights, ids)


def restored(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int8 [..., N, K] and float32 [..., N] -> [..., N, K] of `dtype`, rounded once."""
    return (weight * scale.unsqueeze(-1)).to(dtype)


class _Restored:
    """Looks to vllm.overlay.kernels.moe like experts' weights of `dtype`; each is made when it is asked for."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self._weight, self._scale, self._dtype = weight, scale, dtype
        self.shape = weight.shape

    def __getitem__(self, which: int | torch.Tensor) -> torch.Tensor:
        return restored(self._weight[which], self._scale[which], self._dtype)

    def element_size(self) -> int:
        return self._dtype.itemsize
