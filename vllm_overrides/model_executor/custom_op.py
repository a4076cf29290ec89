"""float16 on the CPU by PyTorch: stock's compiled operators for the CPU know float32 and bfloat16 only."""
from typing import Any

import torch

from vllm.model_executor import custom_op_stock as _stock


class CustomOp(_stock.CustomOp):
    """Stock's operator."""

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(argument, torch.Tensor) and argument.dtype == torch.float16 for argument in args):
            return self.forward_native(*args, **kwargs)
        return super().forward_cpu(*args, **kwargs)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
