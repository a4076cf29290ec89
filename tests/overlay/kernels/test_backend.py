"""The registry of back ends: what is chosen, what is said about it, and what is refused."""
import importlib
import inspect
import os
import re
import sys
import types

import pytest
import torch

from vllm.overlay.kernels import backend
from vllm.overlay.runtime.announced import announced

OPS = ["gated_delta_rule", "causal_conv1d", "int8_weights", "linear", "moe", "paged_attention", "norms", "rope",
       "sampling", "token_mask", "vision_attention"]
VARIABLE = "VLLM_OVERLAY_KERNELS_NORMS"


@pytest.fixture
def said(monkeypatch):
    lines = []
    for level in ("info", "warning"):
        monkeypatch.setattr(backend.logger, level,
                            lambda message, *args, level=level: lines.append((level, message % args)))
    return lines


def norms():
    return backend.Backends("norms", (("torch", "torch_impl"), ("reference", "reference")))


def test_the_first_is_the_default_and_is_logged_once(said, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    backends = norms()
    assert backends.chosen().__name__ == "vllm.overlay.kernels.norms.torch_impl"
    assert backends.chosen() is backends.chosen()
    assert said == [("info", "norms: back end torch (of torch, reference)")]


def test_the_environment_forces_one(said, monkeypatch):
    monkeypatch.setenv(VARIABLE, "reference")
    assert norms().chosen().__name__ == "vllm.overlay.kernels.norms.reference"
    assert said == [("info", f"norms: back end reference (asked for by {VARIABLE})")]


def test_an_unknown_name_is_refused_with_the_choices(monkeypatch):
    monkeypatch.setenv(VARIABLE, "csrc")
    with pytest.raises(ValueError, match=f"{VARIABLE}=csrc: .*no back end 'csrc'; the choices are torch, reference"):
        norms().chosen()


@pytest.fixture
def broken_native(monkeypatch):
    """A first choice that says that it cannot run here."""
    native = types.ModuleType("vllm.overlay.kernels.norms.native")
    native.unavailable = lambda: "no compiler"
    monkeypatch.setitem(importlib.sys.modules, native.__name__, native)
    return backend.Backends("norms", (("native", "native"), ("torch", "torch_impl")))


def test_a_default_that_cannot_run_is_a_loud_line_and_the_next_is_taken(broken_native, said, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert broken_native.chosen().__name__.endswith("torch_impl")
    assert said == [("warning", "norms: back end native cannot run here: no compiler"),
                    ("info", "norms: back end torch (of native, torch)")]


def test_one_that_was_asked_for_and_cannot_run_is_an_error(broken_native, monkeypatch):
    monkeypatch.setenv(VARIABLE, "native")
    with pytest.raises(RuntimeError, match="cannot run here: no compiler; the choices are native, torch"):
        broken_native.chosen()


@pytest.mark.parametrize("op", OPS)
def test_back_ends_of_an_operator_have_the_same_functions_and_parameters(op):
    backends = importlib.import_module(f"vllm.overlay.kernels.{op}").backends
    assert backends.op == op and backends.names[-1] == "reference"
    reference = backends.load("reference")
    functions = {name: list(inspect.signature(value).parameters) for name, value in vars(reference).items()
                 if inspect.isfunction(value) and value.__module__ == reference.__name__ and not name.startswith("_")}
    assert functions
    for name in backends.names:
        module = backends.load(name)
        for function, parameters in functions.items():
            assert list(inspect.signature(getattr(module, function)).parameters) == parameters, (name, function)


def test_all_operators_are_chosen_by_name():
    native = {op for op in OPS if "native" in importlib.import_module(f"vllm.overlay.kernels.{op}").backends.names}
    expected = {}
    for op in sorted(OPS):
        names = [f"{op} prefill", f"{op} decode"] if op in ("int8_weights", "moe") else []
        names = [op, *names] if op != "moe" else names
        expected.update(dict.fromkeys(names, "native" if op in native else "torch"))
    assert native and list(backend.choose_all().items()) == list(expected.items())


def test_a_back_end_for_another_platform_is_passed_over_in_silence(broken_native, said, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    importlib.sys.modules["vllm.overlay.kernels.norms.native"].for_this_platform = lambda: False
    assert broken_native.chosen_name() == "torch"
    assert said == [("info", "norms: back end torch (of native, torch)")]


def test_what_the_server_announced_binds_every_process(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with announced({"norms": "torch", "moe": "native"}):
        assert norms().chosen_name() == "torch"
    before = dict(os.environ)
    with announced({"norms": "native"}), pytest.raises(RuntimeError) as caught:
        norms().chosen()
    assert re.fullmatch(r"norms: the server announced back end native, but process \d+ can only use torch \(its output "
                        rf"says why\): repair that, or set {VARIABLE}=torch", str(caught.value)), caught.value
    assert dict(os.environ) == before


def test_choosing_does_not_touch_a_device(monkeypatch):
    """The server does it too, which must not hold a card. Every back end is imported anew and asked."""
    touched = pytest.fail
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda *_: touched("a device was initialised"))
    monkeypatch.setattr(torch._C, "_cuda_init", lambda *_: touched("a device was initialised"), raising=False)
    asked = 0
    for op in OPS:
        package = importlib.import_module(f"vllm.overlay.kernels.{op}")
        for name, path in package.backends._modules.items():
            monkeypatch.setattr(package, path.rpartition(".")[2], None, raising=False)
            monkeypatch.delitem(sys.modules, path, raising=False)
            try:
                assert package.backends.load(name) is sys.modules[path]
            except RuntimeError as reason:
                assert "cannot run here" in str(reason), reason
            asked += 1
    assert asked >= 2 * len(OPS) and not torch.cuda.is_initialized()
