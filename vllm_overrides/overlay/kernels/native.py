"""The compiled CPU operators, called through ctypes: plain C functions that take addresses, sizes and strides.

The library is that of the best instruction set that this processor has and that has been tried;
VLLM_OVERLAY_NATIVE_ISA (avx512, avx2, portable) names another one. It is built by native_build.py, which says where it
lies. Threads are torch's own: the library's calls of OpenMP are bound to the runtime that torch has loaded, so
`torch.set_num_threads` and the binding of cores hold for both.
"""
import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from vllm.overlay.kernels import native_build
from vllm.utils import is_cpu

ISA_VARIABLE = "VLLM_OVERLAY_NATIVE_ISA"
# As `by_type` of csrc/vec.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


def for_this_platform() -> bool:
    """Whether these operators are meant for what this vLLM runs on."""
    return is_cpu()


def unavailable() -> str | None:
    """See backend.py."""
    if not for_this_platform():
        return "it is for CPUs"
    try:
        path = native_build.library(isa())
    except ValueError as error:
        return str(error)
    if not path.exists():
        return f"{path.name} is not built: run `make overlay`, or native_build.py beside this module"
    return None


def isa() -> str:
    """The instruction set in use.

    Raises:
        ValueError: the environment names one that is unknown, or that this processor lacks.
    """
    flags = _processor_flags()
    fitting = [name for name in native_build.isas() if native_build.ISAS[name][0] <= flags]
    asked = os.environ.get(ISA_VARIABLE, "")
    if not asked:
        return next(name for name in fitting if name not in native_build.UNTRIED)
    if asked not in fitting:
        known = asked in native_build.ISAS
        raise ValueError(f"{ISA_VARIABLE}={asked}: {'this processor lacks it' if known else 'unknown'}; "
                         f"the choices here are {', '.join(fitting)}")
    return asked


def library_multiplies(dtype: torch.dtype) -> bool:
    """Whether PyTorch's library (oneDNN) multiplies matrices of this type with the processor's own arithmetic; else it
    converts, or takes a plain loop."""
    needed = {torch.bfloat16: {"avx512_bf16", "amx_bf16"}, torch.float16: {"avx512_fp16", "amx_fp16"}}
    return dtype == torch.float32 or bool(needed[dtype] & _processor_flags())


def function(name: str, signature: str) -> Callable[..., None]:
    """A function of the library that returns nothing.

    Args:
        signature: a letter per parameter: p an address (an int; None is null), l int64, i int, f float.
    """
    found = getattr(_library(), name)
    found.argtypes = [_TYPES[letter] for letter in signature]
    found.restype = None
    return found


@cache
def _library() -> ctypes.CDLL:
    _share_openmp()
    return ctypes.CDLL(str(native_build.library(isa())))


def _share_openmp() -> None:
    """Makes the OpenMP runtime that is loaded, torch's, visible to a library that names none."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    found = sorted(path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp", "libomp")))
    # Intel's has the same functions, and is first where somebody has preloaded it.
    found.sort(key=lambda path: "libgomp" in Path(path).name)
    ctypes.CDLL(found[0] if found else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


@cache
def _processor_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()
