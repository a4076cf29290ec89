"""Weights to int8: symmetric, one scale for each output channel, to nearest. Done once, while weights are loaded."""
import torch

LARGEST = 127
# Float32 elements that are quantised together: 16 MB.
_BLOCK = 1 << 22


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [..., N, K], any float dtype -> int8 [..., N, K] and float32 [..., N], on the same device."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[:-1], dtype=torch.float32, device=weight.device)
    quantise_into(weight, values, scale)
    return values, scale


def quantise_into(weight: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    """As `quantise`, into given tensors, on their device; `weight` may lie elsewhere.

    A channel with a value that is not finite gets a scale that is not: its results are then NaN, as they would be.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    if weight.shape != values.shape or scale.shape != values.shape[:-1] or values.dtype != torch.int8:
        raise ValueError(f"int8_weights: weight {tuple(weight.shape)} into {values.dtype} {tuple(values.shape)} and "
                         f"scale {tuple(scale.shape)}")
    if weight.dim() > 2:
        for parts in zip(weight, values, scale, strict=True):
            quantise_into(*parts)
        return
    step = max(1, _BLOCK // max(1, weight.shape[1]))
    for at in range(0, weight.shape[0], step):
        block = weight[at:at + step].to(values.device, torch.float32)
        factor = block.abs().amax(1) / LARGEST
        scale[at:at + step] = factor
        block = block / torch.where(factor == 0, torch.ones_like(factor), factor)[:, None]
        values[at:at + step] = block.round_().clamp_(-LARGEST, LARGEST)
