"""What of the suite has no meaning in this environment: skipped by name, with the reason. Loaded by run.py (-p)."""
from __future__ import annotations

import importlib.util
from fnmatch import fnmatch

import pytest

NO_FLOAT16 = "torch 2.1 multiplies no float16 on a CPU (on the card it does)"
OTHER_PIN = "is about the compiled stock vLLM of .venv"
ELSEWHERE = "is about a machine without the vendor's libraries"
# Patterns of node ids. A name in brackets is in fnmatch's own: [[].
SKIPPED = {
    "overlay/kernels/test_moe.py::test_both_paths_equal_the_reference[[]*-dtype2]": NO_FLOAT16,
    "overlay/kernels/test_int8_weights.py::test_products_equal_the_reference_in_any_tiles[[]*-dtype2]": NO_FLOAT16,
    "overlay/kernels/test_int8_weights.py::test_float16_does_not_overflow_in_between": NO_FLOAT16,
    "overlay/kernels/test_selftest.py::test_all_operators_pass_and_the_record_is_complete": NO_FLOAT16,
    "models/test_laws.py::*[[]float16]": NO_FLOAT16,
    "models/test_parity.py::*[[]float16]": NO_FLOAT16,
    "models/test_cache_laws.py::*-float16]": NO_FLOAT16,
    "worker/test_one_code_path.py::test_half_precision_is_what_was_asked_for[[]float16]": NO_FLOAT16,
    "overlay/grammar/test_json_schema.py::*": "is about llguidance alone; the packages with the schemas are in .venv",
    "engine/test_stock_build.py::test_stock_knows_that_it_is_built_for_the_cpu": OTHER_PIN,
}
# The same, where the vendor's files run.
VENDOR_SKIPPED = {
    "e2e/test_demo_server.py::test_start_says_what_runs": OTHER_PIN,
    "overlay/attention/test_choice.py::test_elsewhere_*": ELSEWHERE,
    "engine/test_defaults.py::test_no_graphs_of_a_model_with_recurrent_state":
        "the vendor's arg_utils.py switches graphs off for every model",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    vendor = importlib.util.find_spec("ixformer") is not None
    for item in items:
        for pattern, reason in (SKIPPED | VENDOR_SKIPPED if vendor else SKIPPED).items():
            if fnmatch(item.nodeid, f"*tests/{pattern}"):
                item.add_marker(pytest.mark.skip(reason=reason))
