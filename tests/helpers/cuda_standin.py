"""A CUDA device made of the CPU, for code that takes other ways on a card: stock's worker, executor, memory query.

`install()` makes this process, before it imports vllm, see one card: torch's functions on it do nothing or answer
something plausible, tensors for it are made on the CPU, NCCL is gloo. Only the thread that installs it sees it.
"""
from __future__ import annotations

import importlib.metadata
import sys
import types
from typing import Any

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode

GIB = 1 << 30
TOTAL = 32 * GIB


class _OnTheCpu(TorchFunctionMode):

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        kwargs = {name: _device(value) for name, value in kwargs.items() if name != "pin_memory"}
        return func(*map(_device, args), **kwargs)


def _device(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda" or isinstance(value, str) and value.startswith("cuda"):
        return torch.device("cpu")
    return value


class _Event:

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def install() -> list[str]:
    """Returns a list that grows by the name of each function of torch.cuda that is called."""
    calls: list[str] = []
    free = [TOTAL]

    def memory(*_: Any) -> tuple[int, int]:
        # Every look finds less: stock insists that loading and measuring have taken something.
        free[0] -= GIB // 4
        return free[0], TOTAL

    def replace(name: str, answer: Any) -> None:
        def replaced(*args: Any, **_: Any) -> Any:
            calls.append(name)
            return answer(*args) if callable(answer) else answer
        setattr(torch.cuda, name, replaced)

    for name, answer in {"is_available": True, "device_count": 1, "set_device": None, "empty_cache": None,
                         "synchronize": None, "mem_get_info": memory, "reset_peak_memory_stats": None,
                         "max_memory_allocated": GIB, "manual_seed_all": None}.items():
        replace(name, answer)
    torch.cuda.Event = _Event  # type: ignore[misc, assignment]
    init, group = torch.distributed.init_process_group, torch.distributed.new_group
    torch.distributed.init_process_group = lambda backend=None, **more: init(backend="gloo", **more)
    torch.distributed.new_group = lambda ranks=None, backend=None, **more: group(ranks, backend="gloo", **more)

    nvml: Any = types.ModuleType("pynvml")
    nvml.__file__ = "pynvml.py"
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 1
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: (8, 0)
    sys.modules["pynvml"] = nvml
    # By it stock tells its build for the CPU.
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version(name).replace("cpu", "cuda")
    _OnTheCpu().__enter__()
    return calls
