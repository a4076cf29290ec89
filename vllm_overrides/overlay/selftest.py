"""`python -m vllm.overlay.selftest`: every operator's back ends against their reference, on the machine at hand.

The reference always runs on the CPU in float32, so that a device that computes wrongly cannot agree with itself.
Prints a line per comparison with its error and tolerance; exit code 0 if all are within, 1 if not, 2 for a wrong
command line.
"""
import argparse
import json
import math
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vllm.overlay.kernels.cases import Case, Inputs, Outputs, all_cases

SEED = 20260701


@dataclass
class Result:
    """One output of one case on one back end. error and tolerance are relative to the largest magnitude.

    A difference that is no number (and a back end that raised) has the error infinity, in JSON null.
    """
    op: str
    case: str
    backend: str
    dtype: str
    output: str
    error: float
    tolerance: float
    passed: bool
    note: str = ""


def run_case(case: Case, device: torch.device) -> list[Result]:
    """Compares all back ends that can run on this machine with the reference, in each of the case's dtypes."""
    results: list[Result] = []
    for dtype in case.dtypes:
        inputs = case.build(torch.Generator().manual_seed(SEED), dtype)
        truth = case.run(case.backends.load("reference"), _copied(inputs, torch.device("cpu")))
        for name in case.backends.names:
            if name == "reference" and device.type == "cpu":
                continue
            results += _compare(case, name, dtype, inputs, truth, device)
    return results


def _compare(case: Case, name: str, dtype: torch.dtype, inputs: Inputs, truth: Outputs,
             device: torch.device) -> list[Result]:
    label = str(dtype).replace("torch.", "")
    try:
        module = case.backends.load(name)
    except RuntimeError as reason:
        return [Result(case.op, case.name, name, label, "", 0.0, 0.0, True, f"not run: {reason}")]
    try:
        got = {key: value.cpu() for key, value in case.run(module, _copied(inputs, device)).items()}
    except Exception as raised:  # A back end that raises has failed; the others are still worth testing.
        if device.type == "cpu" and "not implemented for 'Half'" in str(raised):
            # torch 2.1 multiplies float16 on a card only; it is the machine that cannot, not the back end.
            return [Result(case.op, case.name, name, label, "", 0.0, 0.0, True, f"{label} not run: {raised}")]
        traceback.print_exc()
        return [Result(case.op, case.name, name, label, "", float("inf"), 0.0, False, repr(raised))]
    results = []
    for output, tolerances in case.tolerance.items():
        error = relative_error(got[output], truth[output])
        tolerance = tolerances[dtype]
        results.append(Result(case.op, case.name, name, label, output, error, tolerance, error <= tolerance))
    return results


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference over the truth's largest magnitude; infinity for another shape or dtype, or a non-finite."""
    if got.shape != truth.shape or got.dtype != truth.dtype:
        return float("inf")
    difference = (got.double() - truth.double()).abs()
    if not torch.isfinite(difference).all():
        return float("inf")
    return float(difference.max() / truth.double().abs().max().clamp_min(1e-30)) if difference.numel() else 0.0


def _copied(inputs: Inputs, device: torch.device) -> Inputs:
    return {key: value.clone().to(device) if isinstance(value, torch.Tensor) else value
            for key, value in inputs.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the self test; see the module."""
    cases = all_cases()
    ops = list(dict.fromkeys(case.op for case in cases))
    parser = argparse.ArgumentParser(prog="python -m vllm.overlay.selftest", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE", help="write machine, command and all results to FILE")
    parser.add_argument("--op", choices=ops, action="append", help="only this operator (may be repeated)")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")

    started = time.monotonic()
    results: list[Result] = []
    with torch.inference_mode():
        for case in cases:
            if args.op is None or case.op in args.op:
                for result in run_case(case, device):
                    results.append(result)
                    print(_line(result), flush=True)
    failed = [result for result in results if not result.passed]
    seconds = time.monotonic() - started
    machine = _machine(device)
    print(f"{len(results) - len(failed)} of {len(results)} comparisons passed in {seconds:.1f} s "
          f"on {machine['device']}")
    if args.json:
        record = {"command": ["selftest", *(argv if argv is not None else sys.argv[1:])], "machine": machine,
                  "seconds": round(seconds, 1), "passed": not failed,
                  "results": [{**asdict(result), "error": result.error if math.isfinite(result.error) else None}
                              for result in results]}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1, allow_nan=False)
            file.write("\n")
    return 1 if failed else 0


def _line(result: Result) -> str:
    if result.note:
        return f"{'pass' if result.passed else 'FAIL'}  {result.op} / {result.case} / {result.backend}  {result.note}"
    return (f"{'pass' if result.passed else 'FAIL'}  {result.op} / {result.case} / {result.output}  {result.backend}  "
            f"{result.dtype}  error {result.error:.2e}  tolerance {result.tolerance:.1e}")


def _machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version(),
            "threads": torch.get_num_threads()}


if __name__ == "__main__":
    sys.exit(main())
