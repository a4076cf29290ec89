"""A weight that a back end has packed for itself: its rows lie in another order, which nothing else can read."""
from typing import NamedTuple, TypeAlias

import torch


class Panels(NamedTuple):
    """numbers: [..., N, K], the memory of the weight. operand: dtype of the rows that it is packed for."""
    numbers: torch.Tensor
    operand: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the weight."""
        return self.numbers.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.numbers.dtype


Weight: TypeAlias = torch.Tensor | Panels


def check_operand(what: str, x: torch.Tensor, *weights: Weight) -> None:
    """Raises ValueError where a weight is packed for rows of another dtype than x's."""
    for weight in weights:
        if isinstance(weight, Panels) and weight.operand != x.dtype:
            raise ValueError(f"{what}: x {x.dtype}, a weight that is packed for {weight.operand}")
