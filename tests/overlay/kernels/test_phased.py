"""MOE_NATIVE and MOE_DECODE_NATIVE: which back end runs for how many tokens, and what is refused."""
import re

import pytest
import torch

from vllm.overlay.kernels import int8_weights, moe, native, phased
from vllm.overlay.runtime.announced import announced

MODULES = (("native", "native"), ("torch", "torch_impl"), ("reference", "reference"))
NATIVE = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
VARIABLES = ("MOE_NATIVE", "MOE_DECODE_NATIVE", "VLLM_OVERLAY_KERNELS_MOE", "VLLM_OVERLAY_KERNELS_INT8_WEIGHTS")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def back_ends(op="moe"):
    """As in a process that has not chosen yet."""
    return phased.PhasedBackends(op, MODULES, entirely=op == "moe")


@NATIVE
@pytest.mark.parametrize(("environment", "prefill", "decode"), [
    ({}, "native", "native"),
    ({"MOE_NATIVE": "", "MOE_DECODE_NATIVE": ""}, "native", "native"),
    ({"MOE_NATIVE": "0"}, "torch_impl", "native"),
    ({"MOE_DECODE_NATIVE": "0"}, "native", "torch_impl"),
    ({"MOE_NATIVE": "1", "MOE_DECODE_NATIVE": "0"}, "native", "torch_impl"),
    ({"VLLM_OVERLAY_KERNELS_MOE": "reference"}, "reference", "reference"),
    ({"VLLM_OVERLAY_KERNELS_MOE": "torch", "MOE_NATIVE": "0"}, "torch_impl", "torch_impl"),
    ({"VLLM_OVERLAY_KERNELS_MOE": "native", "MOE_DECODE_NATIVE": "1"}, "native", "native"),
])
def test_who_runs_for_how_many_tokens(environment, prefill, decode, monkeypatch):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    backends = back_ends()
    names = [backends.chosen_for(tokens).__name__.rpartition(".")[2] for tokens in (17, 4096, 0, 1, 16)]
    assert names == [prefill, prefill, decode, decode, decode]
    short = {"native": "native", "torch_impl": "torch", "reference": "reference"}
    assert backends.choices() == {"moe prefill": short[prefill], "moe decode": short[decode]}


def test_it_is_logged_once(monkeypatch):
    said = []
    monkeypatch.setattr(phased.logger, "info", lambda message, *args: said.append(message % args))
    monkeypatch.setenv("MOE_NATIVE", "0")
    monkeypatch.setenv("MOE_DECODE_NATIVE", "0")
    backends = back_ends()
    for tokens in (1, 100, 1):
        backends.chosen_for(tokens)
    assert said == ["moe: back end torch for more than 16 tokens (MOE_NATIVE), torch for up to 16 (MOE_DECODE_NATIVE)"]


@pytest.mark.parametrize(("environment", "message"), [
    ({"MOE_NATIVE": "2"}, "MOE_NATIVE=2: must be 0, 1 or empty"),
    ({"MOE_DECODE_NATIVE": "true"}, "MOE_DECODE_NATIVE=true: must be 0, 1 or empty"),
    ({"MOE_DECODE_NATIVE": "1", "VLLM_OVERLAY_KERNELS_MOE": "torch"},
     "MOE_DECODE_NATIVE=1 contradicts VLLM_OVERLAY_KERNELS_MOE=torch: it asks for back end native"),
    ({"MOE_NATIVE": "0", "VLLM_OVERLAY_KERNELS_MOE": "native"},
     "MOE_NATIVE=0 contradicts VLLM_OVERLAY_KERNELS_MOE=native: it asks for back end torch"),
    ({"MOE_NATIVE": "0", "VLLM_OVERLAY_KERNELS_MOE": "reference"},
     "MOE_NATIVE=0 contradicts VLLM_OVERLAY_KERNELS_MOE=reference: it asks for back end torch"),
])
def test_what_is_refused(environment, message, monkeypatch):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        back_ends().chosen_for(1)


def test_int8_is_held_to_its_own_variable(monkeypatch):
    monkeypatch.setenv("MOE_NATIVE", "0")
    monkeypatch.setenv("VLLM_OVERLAY_KERNELS_INT8_WEIGHTS", "native")
    with pytest.raises(ValueError, match="MOE_NATIVE=0 contradicts VLLM_OVERLAY_KERNELS_INT8_WEIGHTS=native"):
        back_ends("int8_weights").choices()


@pytest.mark.parametrize("variable", ["MOE_NATIVE", "MOE_DECODE_NATIVE"])
def test_compiled_code_that_is_asked_for_must_run(variable, monkeypatch):
    """As on a card, for which there is none; there, unset and 0 are PyTorch's."""
    module = back_ends().load("torch").__name__.replace("torch_impl", "native")
    monkeypatch.setattr(f"{module}.unavailable", lambda: "it is for CPUs")
    monkeypatch.setattr(f"{module}.for_this_platform", lambda: False)
    assert back_ends().choices() == {"moe prefill": "torch", "moe decode": "torch"}
    monkeypatch.setenv(variable, "1")
    with pytest.raises(RuntimeError, match=f"^{variable}=1: moe: back end 'native' cannot run here: it is for CPUs; "
                                           "the choices are native, torch, reference$"):
        back_ends().choices()


@NATIVE
def test_the_server_and_its_workers_agree(monkeypatch):
    with announced({"moe prefill": "native", "moe decode": "native"}):
        assert back_ends().choices()
        monkeypatch.setenv("MOE_DECODE_NATIVE", "0")
        with pytest.raises(RuntimeError, match=r"^moe decode: the server announced back end native, but process \d+ "
                                               r"can only use torch \(.*\): repair that, or set MOE_DECODE_NATIVE=0$"):
            back_ends().chosen_for(1)


@NATIVE
def test_the_operators_follow(monkeypatch):
    """Routing, experts and int8 experts are each the chosen module's; int8's linear products are not switched."""
    monkeypatch.setenv("MOE_DECODE_NATIVE", "0")
    monkeypatch.setattr(moe, "backends", back_ends())
    monkeypatch.setattr(int8_weights, "backends", back_ends("int8_weights"))
    assert int8_weights.backends.choices() == {"int8_weights": "native", "int8_weights prefill": "native",
                                               "int8_weights decode": "torch"}
    called = []

    def noted(true, what):
        def call(*args):
            called.append(what)
            return true(*args)
        return call

    for package in (moe, int8_weights):
        for name in ("native", "torch"):
            module = package.backends.load(name)
            for function in {"route", "experts", "int8_experts", "int8_linear"} & vars(module).keys():
                monkeypatch.setattr(module, function, noted(getattr(module, function), f"{name} {function}"))
    w13, w2 = torch.randn(4, 6, 8), torch.randn(4, 8, 3)
    (q13, s13), (q2, s2) = int8_weights.quantise(w13), int8_weights.quantise(w2)
    for tokens in (16, 17):
        x = torch.randn(tokens, 8)
        weights, ids = moe.route(torch.randn(tokens, 4), 2)
        moe.experts(x, w13, w2, weights, ids)
        int8_weights.int8_experts(x, q13, s13, q2, s2, weights, ids)
        int8_weights.int8_linear(x, q13[0], s13[0])
    # PyTorch's int8 experts are its experts, over weights that are restored one by one.
    few = ["torch route", "torch experts", "torch int8_experts", "torch experts", "native int8_linear"]
    assert called == [*few, "native route", "native experts", "native int8_experts", "native int8_linear"]
