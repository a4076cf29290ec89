"""Our operators, references included, against transformers' definition of the model, run in its own environment."""
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.overlay.kernels.helpers import assert_close
from vllm.overlay.kernels import causal_conv1d, gated_delta_rule, moe, norms, rope

PROGRAM = Path(__file__).with_name("transformers_operators.py")
BACKENDS = ["torch", "reference"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    python = os.environ["VLLM_OVERLAY_REFERENCE_PYTHON"]
    assert Path(python).exists(), f"{python} does not exist: `make env-reference` makes it"
    out = tmp_path_factory.mktemp("transformers") / "out.pt"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([python, str(PROGRAM), str(out)], capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gate(theirs, backend):
    data = theirs["delta_rule"]
    g, beta = gated_delta_rule.backends.load(backend).gate(data["a"][0], data["b"][0], data["A_log"], data["dt_bias"])
    assert_close(g, data["g"][0], 1e-6, "g")
    assert_close(beta, data["beta"][0], 1e-6, "beta")


# transformers' chunked form takes decays from differences of running sums and is 6e-6 off its own stepwise form here.
@pytest.mark.parametrize("form, tolerance", [("chunked", 3e-5), ("stepwise", 3e-6)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_delta_rule(theirs, backend, form, tolerance):
    data = theirs["delta_rule"]
    pool = data["state"].clone()
    tokens = data["q"].shape[1]
    got = gated_delta_rule.backends.load(backend).gated_delta_rule(
        data["q"][0], data["k"][0], data["v"][0], data["g"][0], data["beta"][0], pool, torch.tensor([0]), [0, tokens],
        1, (), [0])
    assert_close(got, data[form][0], tolerance, "o")
    assert_close(pool, data[f"{form}_state"], tolerance, "state")


@pytest.mark.parametrize("backend", BACKENDS)
def test_convolution(theirs, backend):
    data = theirs["convolution"]
    x = data["x"][0].t().contiguous()
    got = causal_conv1d.backends.load(backend).causal_conv1d(x, data["weight"], None, torch.zeros(1, 10, 3),
                                                             torch.tensor([0]), [0, 30], 1, ())
    assert_close(got.t(), data["y"][0], 2e-6, "y")


@pytest.mark.parametrize("backend", BACKENDS)
def test_norms(theirs, backend):
    data, module = theirs["norms"], norms.backends.load(backend)
    assert_close(module.rms_norm(data["x"], data["weight"], 1e-6, None, True), data["plain"], 1e-6, "plain")
    assert_close(module.gated_rms_norm(data["x"], data["z"], data["weight"], 1e-6), data["gated"], 1e-6, "gated")


@pytest.mark.parametrize("backend", rope.backends.names)
def test_rope(theirs, backend):
    data = theirs["rotary"]
    rotation = rope.RotaryTable(24, 1e7, (5, 4, 3))(data["positions"][:, 0])
    q, k = (data[name][0].transpose(0, 1).contiguous() for name in ("q", "k"))
    got = rope.backends.load(backend).apply_rope(q, k, rotation.cos, rotation.sin)
    for turned, name in zip(got, ("turned_q", "turned_k"), strict=True):
        assert_close(turned.transpose(0, 1), data[name][0], 1e-6, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts(theirs, backend):
    data, module = theirs["experts"], moe.backends.load(backend)
    weights, ids = module.route(data["logits"], 3, True)
    assert torch.equal(ids, data["ids"])
    assert_close(weights, data["weights"], 1e-6, "weights")
    assert_close(module.experts(data["x"], data["w13"], data["w2"], weights, ids), data["y"], 2e-6, "y")
