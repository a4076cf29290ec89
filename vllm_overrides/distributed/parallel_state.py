"""All-reduce and gather of CPU tensors by torch.distributed (gloo); stock imports Intel's extension for the first, and
nobody needs it otherwise."""
from typing import Any

import torch

from vllm.distributed import parallel_state_stock as _stock
from vllm.overlay.rebind import rebind


class GroupCoordinator(_stock.GroupCoordinator):
    """Stock's group of ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("torch_distributed_backend") == "gloo":
            # With a CUDA build of torch, stock finds NCCL and wants a card for it.
            kwargs["use_pynccl"] = False
        super().__init__(*args, **kwargs)

    def _all_reduce_in_place(self, input_: torch.Tensor) -> torch.Tensor | None:
        if not input_.is_cpu:
            return super()._all_reduce_in_place(input_)
        known = _known_to_gloo(input_)
        torch.distributed.all_reduce(known, group=self.device_group)
        return input_ if known is input_ else input_.copy_(known)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        # Alone, stock gives back what it is given: no other type is needed.
        if not input_.is_cpu or self.world_size == 1:
            return super().gather(input_, dst, dim)
        # torch 2.1's gloo writes the parts from a thread of its own, which may not write to inference tensors.
        with torch.inference_mode(False):
            gathered = super().gather(_known_to_gloo(input_), dst, dim)
        return gathered if gathered is None else gathered.to(input_.dtype)


def _known_to_gloo(tensor: torch.Tensor) -> torch.Tensor:
    """Itself, or in float32 what torch 2.1's gloo refuses."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


# The functions that make groups are stock's and name the class.
rebind(_stock, "GroupCoordinator", GroupCoordinator)

# `vllm.distributed` imports * from here, which does not ask __getattr__ for names that __all__ does not list.
__all__ = [name for name in vars(_stock) if not name.startswith("_")]


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
