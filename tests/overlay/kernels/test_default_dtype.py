"""vLLM loads models under another default dtype; what an operator allocates must not follow it."""
import pytest
import torch

from tests.overlay.kernels.helpers import relative_error, runnable
from vllm.overlay.kernels.cases import all_cases


@pytest.mark.parametrize("case, backend", [
    pytest.param(case, backend, id=f"{case.op}: {case.name}, {backend}") for case in all_cases()
    if case.op != "sampling" for backend in runnable(case.backends)])
def test_results_do_not_depend_on_the_default_dtype(case, backend):
    results = []
    for default in (torch.float32, torch.bfloat16):
        inputs = case.build(torch.Generator().manual_seed(1), torch.float32)
        torch.set_default_dtype(default)
        try:
            results.append(case.run(case.backends.load(backend), inputs))
        finally:
            torch.set_default_dtype(torch.float32)
    for output, tolerances in case.tolerance.items():
        error = relative_error(results[1][output], results[0][output])
        assert results[1][output].dtype == results[0][output].dtype, output
        assert error <= tolerances[torch.float32], f"{output}: {error:.2e}"
