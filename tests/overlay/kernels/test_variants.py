"""The compiled operators' tests once more: for every instruction set that this processor has besides the one in use,
for lanes and products of better ones, and under the sanitizers."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.overlay.kernels import native_build

HERE = Path(__file__).parent
OPERATORS = [HERE / f"test_{name}.py" for name in ("linear", "moe", "int8_weights", "norms", "rope", "causal_conv1d",
                                                   "gated_delta_rule", "paged_attention")]
# Python and torch leak, and Python's own memory is not the sanitizer's to watch.
SANITIZERS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
# PyTorch's own teams wait for each other in an OpenMP that the sanitizer does not see into; ours are threads there.
NOT_OURS = "race:libtorch\nrace:libgomp\nmutex:libtorch\n"
READS_PAST_THE_END = """
import torch
from vllm.overlay.kernels import native
linear = native.function("linear", "iplppplll")
x, weight, out = torch.zeros(1, 64), torch.zeros(1, 64), torch.zeros(1, 4)
linear(0, x.data_ptr(), 64, weight.data_ptr(), None, out.data_ptr(), 1, 4, 64)
"""


def environment(name, folder):
    variant = native_build.VARIANTS.get(name)
    suppressions = folder / "suppressions"
    suppressions.write_text(NOT_OURS)
    found = {**os.environ, **SANITIZERS, "TSAN_OPTIONS": f"halt_on_error=1 suppressions={suppressions}",
             "VLLM_OVERLAY_NATIVE_ISA": name}
    if variant and variant.runtime:
        # A runtime that starts before the C++ library finds none of what it watches, and ends at the first exception.
        places = [subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True,
                                 check=True).stdout.strip() for name in (variant.runtime, "libstdc++.so")]
        found |= {"LD_PRELOAD": " ".join(places), "OMP_NUM_THREADS": "2"}
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", [*native_build.fitting()[1:], *native_build.VARIANTS])
def test_the_operators(name, tmp_path):
    native_build.build(names=[name])
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p",
                           "no:faulthandler", "-k", "native", *map(str, OPERATORS)],
                          env=environment(name, tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout.splitlines()[-1], done.stdout[-1000:]


@pytest.mark.long
def test_the_address_sanitizer_sees_what_it_is_there_for(tmp_path):
    native_build.build(names=["asan"])
    done = subprocess.run([sys.executable, "-c", READS_PAST_THE_END], env=environment("asan", tmp_path),
                          capture_output=True, text=True)
    assert done.returncode != 0 and "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-2000:]
