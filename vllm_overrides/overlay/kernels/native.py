"""The compiled CPU operators, called through ctypes: plain C functions that take addresses, sizes and strides.

The library is that of the best instruction set that this processor has (avx512bf16, avx512, avx2, portable);
VLLM_OVERLAY_NATIVE_ISA names another one, or a variant for tests (wide, paired, asan, tsan). It is built by
native_build.py, which says where it lies. Threads are torch's own: the library's calls of OpenMP are bound to the
runtime that torch has loaded, so `torch.set_num_threads` and the binding of cores hold for both.
"""
import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from vllm.overlay.kernels import native_build
from vllm.overlay.kernels.panels import Panels, Weight
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
        name = isa()
    except ValueError as error:
        return str(error)
    path = native_build.library(name)
    if not path.exists():
        if name in native_build.VARIANTS:
            return f"{path.name} is not built: run native_build.py --variant {name}, beside this module"
        return f"{path.name} is not built: run `make overlay`, or native_build.py beside this module"
    return _lacks_runtime(name)


def isa() -> str:
    """The instruction set in use, or the variant that the environment names.

    Raises:
        ValueError: the environment names one that is unknown, or that this processor lacks.
    """
    choices = [*native_build.fitting(), *native_build.VARIANTS]
    asked = os.environ.get(ISA_VARIABLE, "")
    if not asked:
        return native_build.fitting()[0]
    if asked not in choices:
        known = asked in native_build.ISAS
        raise ValueError(f"{ISA_VARIABLE}={asked}: {'this processor lacks it' if known else 'unknown'}; "
                         f"the choices here are {', '.join(choices)}")
    return asked


def _lacks_runtime(name: str) -> str | None:
    """Why a variant cannot be loaded into this process. Its sanitizer would end the process."""
    variant = native_build.VARIANTS.get(name)
    if variant is None or not variant.runtime or variant.runtime in Path("/proc/self/maps").read_text():
        return None
    files = " ".join(f"$(g++ -print-file-name={file})" for file in (variant.runtime, "libstdc++.so"))
    return f'{ISA_VARIABLE}={name}: start Python with LD_PRELOAD="{files}"'


@cache
def library_multiplies(dtype: torch.dtype) -> bool:
    """Whether products of many rows are left to PyTorch's library (oneDNN, MKL): where the processor has arithmetic of
    this type that ours does not use. linear/README.md says what ours reach elsewhere."""
    needed = {torch.bfloat16: {"amx_bf16"}, torch.float16: {"avx512_fp16", "amx_fp16"}}.get(dtype, set())
    if isa() != "avx512bf16" and dtype == torch.bfloat16:
        needed = {*needed, "avx512_bf16"}
    return bool(needed & native_build.processor_flags())


def function(name: str, signature: str) -> Callable[..., None]:
    """A function of the library that returns nothing.

    Args:
        signature: a letter per parameter: p an address (an int; None is null), l int64, i int, f float.
    """
    found = getattr(_library(), name)
    found.argtypes = [_TYPES[letter] for letter in signature]
    found.restype = None
    return found


def pack(name: str, weight: torch.Tensor, part: int, operand: torch.dtype) -> Weight:
    """`weight` [..., N, K] packed where it lies, by the library's function `name`; or as it is, where it does not fill
    panels.

    Args:
        part: rows that are multiplied by themselves. operand: dtype of what it will be multiplied with.
    """
    if not weight.is_contiguous():
        return weight
    packed, rows = ctypes.c_int32(0), weight.shape[:-1].numel()
    function(name, "iplllp")(DTYPES[operand], weight.data_ptr(), rows, weight.shape[-1], part, ctypes.addressof(packed))
    return Panels(weight, operand) if packed.value else weight


def numbers(weight: Weight) -> tuple[torch.Tensor, bool]:
    """(the memory of a weight, without gaps; whether it is packed)"""
    return (weight.numbers, True) if isinstance(weight, Panels) else (weight.contiguous(), False)


@cache
def _library() -> ctypes.CDLL:
    _share_openmp()
    return ctypes.CDLL(str(native_build.library(isa())))


def _share_openmp() -> None:
    """Makes the OpenMP runtime that torch calls visible to a library that names none.

    Other packages (sentencepiece) load runtimes of their own. One of theirs would have a second team of threads, which
    spins on the cores that torch's team waits for.
    """
    ctypes.CDLL(_openmp_of_torch(), mode=ctypes.RTLD_GLOBAL)


def _openmp_of_torch() -> str:
    """The file of the OpenMP runtime that torch was linked with. (One that was preloaded comes before it everywhere.)

    Raises:
        OSError: torch's CPU library is not loaded, or was built without OpenMP.
    """
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    torch_library = next((path for path in sorted(loaded) if Path(path).name == "libtorch_cpu.so"), None)
    if torch_library is None:
        raise OSError("libtorch_cpu.so is not among this process's libraries")
    try:
        # Searches this library and what it was linked with, nothing else.
        symbol = ctypes.CDLL(torch_library).omp_get_max_threads
    except AttributeError:
        raise OSError(f"{torch_library} was built without OpenMP") from None
    place = _Place()
    if not ctypes.CDLL(None).dladdr(ctypes.cast(symbol, ctypes.c_void_p), ctypes.byref(place)):
        raise OSError("dladdr does not know where omp_get_max_threads lies")
    return os.fsdecode(place.file)


class _Place(ctypes.Structure):
    """Dl_info of dlfcn.h."""
    _fields_ = (("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p),
                ("address", ctypes.c_void_p))
