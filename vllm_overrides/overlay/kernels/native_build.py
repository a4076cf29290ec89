"""Compiles the CPU operators (csrc/*.cpp): one library per instruction set, beside the installed vLLM. Standard library
only; run as a program, it neither imports vLLM nor torch.

    python .../vllm/overlay/kernels/native_build.py [--quiet] [--variant wide] [--variant asan] [...]

Variants are for tests of the sources: built where they are asked for, used where VLLM_OVERLAY_NATIVE_ISA names them.
The sources are plain C++ that includes nothing of torch's, so a library fits every torch and Python. Libraries are kept
in `vllm_overlay_native/<digest of sources and flags>` beside the package: the tree of vLLM itself stays what the
receipt says. What is there is not built again.
"""
import argparse
import concurrent.futures
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).resolve().parent
# Best first. What a processor must have (the names of /proc/cpuinfo) and what the compiler is told. No fast-math: sums
# may be reordered by hand only, and what is not finite must stay so.
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c")
_AVX512_FLAGS = (*(f"-m{name}" for name in _AVX512), "-mprefer-vector-width=512")
ISAS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "avx512bf16": (frozenset({*_AVX512, "avx512_bf16"}), (*_AVX512_FLAGS, "-mavx512bf16")),
    "avx512": (frozenset(_AVX512), _AVX512_FLAGS),
    "avx2": (frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c")),
    "portable": (frozenset(), ()),
}


@dataclass(frozen=True)
class Variant:
    """Another library for one of this processor's instruction sets.

    flags: further ones of the compiler. runtime: the library of the compiler's that Python must be started with, or "".
    widest: the best set that it is for.
    """
    flags: tuple[str, ...]
    runtime: str = ""
    widest: str = "avx512bf16"

    def isa(self) -> str:
        """The set that it is built for here."""
        names = list(ISAS)
        return next(name for name in fitting() if names.index(name) >= names.index(self.widest))


# Lines of the sources in reports, and teams of threads for the small inputs of tests too.
_SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-DTEAM_WORK=1")
VARIANTS = {
    # The lanes of AVX-512, and the products of its BF16: what it does can be tried where it is not.
    "wide": Variant(("-DLANES=16",), widest="avx2"),
    "paired": Variant(("-DPAIRED_BY_HAND",), widest="avx2"),
    "asan": Variant(("-fsanitize=address,undefined", *_SANITIZED), "libasan.so"),
    "tsan": Variant(("-fsanitize=thread", *_SANITIZED), "libtsan.so"),
}
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-Wall",
          "-Wextra", "-Wno-vla", "-Wno-psabi",
          # GCC 12 says it of its own header for AVX-512.
          "-Wno-maybe-uninitialized")


def isas() -> list[str]:
    """Instruction sets that libraries are built for on this kind of processor, best first."""
    return list(ISAS) if platform.machine() in ("x86_64", "AMD64") else ["portable"]


@cache
def processor_flags() -> frozenset[str]:
    """What /proc/cpuinfo says this processor has."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def fitting() -> list[str]:
    """Those of isas() that this processor has, best first."""
    return [name for name in isas() if ISAS[name][0] <= processor_flags()]


def compiler_flags(name: str) -> list[str]:
    """What the compiler is told for an instruction set or a variant, but for what it is to make."""
    variant = VARIANTS.get(name)
    return [*_FLAGS, *ISAS[variant.isa() if variant else name][1], *(variant.flags if variant else ())]


def sources() -> list[Path]:
    """The files that are compiled."""
    return sorted([*KERNELS.glob("csrc/*.cpp"), *KERNELS.glob("*/csrc/*.cpp")])


def digest() -> str:
    """Of all that the libraries depend on, but the compiler."""
    flags = sorted((isa, flags) for isa, (_, flags) in ISAS.items()), sorted(VARIANTS.items(), key=lambda item: item[0])
    found = hashlib.sha256(repr((_FLAGS, *flags)).encode())
    for path in sorted([*sources(), *KERNELS.glob("csrc/*.h"), *KERNELS.glob("*/csrc/*.h")]):
        found.update(str(path.relative_to(KERNELS)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def folder() -> Path:
    """Where the libraries of these sources lie, or would."""
    return KERNELS.parents[2] / "vllm_overlay_native" / digest()


def library(name: str) -> Path:
    """The library of an instruction set or of a variant, whether it is there or not."""
    return folder() / f"{name}-{VARIANTS[name].isa()}.so" if name in VARIANTS else folder() / f"{name}.so"


def build(compiler: str = os.environ.get("CXX", "g++"), jobs: int | None = None,
          names: Sequence[str] | None = None) -> list[Path]:
    """Builds what is missing of `names` (of isas() and VARIANTS; None: isas()). jobs: compilers at a time; None: one
    per core.

    Raises:
        FileNotFoundError: no compiler. subprocess.CalledProcessError: it refuses; its words are on stderr.
    """
    missing = [name for name in (isas() if names is None else names) if not library(name).exists()]
    if not missing:
        return []
    if shutil.which(compiler) is None:
        raise FileNotFoundError(f"no C++ compiler {compiler!r}: install g++, or name one with CXX=")
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder()) as work:
        # OpenMP's runtime is left open: it must be the one that torch has loaded (native.py).
        jobs = jobs or len(os.sched_getaffinity(0))
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            objects = {(name, source): Path(work) / f"{name}-{source.stem}.o" for name in missing
                       for source in sources()}
            compiling = [pool.submit(_run, [compiler, *compiler_flags(name), "-c", str(source), "-o", str(out)])
                         for (name, source), out in objects.items()]
            for each in compiling:
                each.result()
        for name in missing:
            partial = Path(work) / library(name).name
            sanitizers = [flag for flag in compiler_flags(name) if flag.startswith("-fsanitize=")]
            _run([compiler, "-shared", *sanitizers, *(str(out) for (one, _), out in objects.items() if one == name),
                  "-o", str(partial)])
            partial.rename(library(name))
    for old in folder().parent.iterdir():
        if old != folder():
            shutil.rmtree(old, ignore_errors=True)
    return [library(name) for name in missing]


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def main() -> int:
    """Returns the exit status: 0 built or there, 1 not built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quiet", action="store_true", help="say nothing where nothing was to be done")
    parser.add_argument("--variant", action="append", choices=[*VARIANTS], help="build this one instead")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        built = build(names=options.variant)
    except (FileNotFoundError, OSError, subprocess.CalledProcessError) as error:
        print(f"native_build: {error}", file=sys.stderr)
        return 1
    if built or not options.quiet:
        names = ", ".join(path.stem for path in built) or "nothing to do"
        print(f"native operators: {names}, {time.monotonic() - started:.0f} s, {folder()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
