"""`python -m vllm.overlay.selftest`: what it says of good and of broken back ends."""
import json
import time

import pytest
import torch

from vllm.overlay import selftest
from vllm.overlay.kernels.gated_delta_rule import torch_impl

OPS = ["gated_delta_rule", "causal_conv1d", "moe", "linear", "int8_weights", "paged_attention", "vision_attention",
       "norms", "rope", "sampling", "token_mask"]


def test_all_operators_pass_and_the_record_is_complete(tmp_path, capsys):
    started = time.monotonic()
    assert selftest.main(["--device", "cpu", "--json", str(tmp_path / "out.json")]) == 0
    seconds = time.monotonic() - started
    assert seconds < 60, f"took {seconds:.0f} s"
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["passed"] and record["machine"]["torch"] == torch.__version__
    assert list(dict.fromkeys(result["op"] for result in record["results"])) == OPS
    for op in set(OPS) - {"sampling"}:
        assert {result["dtype"] for result in record["results"] if result["op"] == op} == {
            "float32", "bfloat16", "float16"}, op
    assert all(result["error"] <= result["tolerance"] for result in record["results"])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(record["results"]) + 1 and all("tolerance" in line for line in printed[:-1])


@pytest.mark.parametrize("op", OPS)
def test_one_operator_alone(op, tmp_path):
    assert selftest.main(["--device", "cpu", "--op", op, "--json", str(tmp_path / "out.json")]) == 0
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert results and {result["op"] for result in results} == {op}


def test_a_wrong_back_end_fails_with_its_error(monkeypatch, tmp_path, capsys):
    right = torch_impl.gated_delta_rule
    monkeypatch.setattr(torch_impl, "gated_delta_rule",
                        lambda q, k, v, g, *rest, **named: right(q, k, v, 0.999 * g, *rest, **named))
    assert selftest.main(["--device", "cpu", "--op", "gated_delta_rule", "--json", str(tmp_path / "out.json")]) == 1
    record = json.loads((tmp_path / "out.json").read_text())
    failed = {(result["case"], result["output"]) for result in record["results"] if not result["passed"]}
    assert not record["passed"] and ("mixed rows, odd heads", "o") in failed
    assert "FAIL  gated_delta_rule / mixed rows, odd heads / o  torch  float32  error" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["raises", "not finite"])
def test_a_back_end_that_raises_or_returns_nan_fails_and_the_rest_is_still_tested(fault, monkeypatch, tmp_path):

    def broken(a, b, A_log, dt_bias):
        if fault == "raises":
            raise RuntimeError("no such instruction")
        return a.float() * float("nan"), b.float()

    monkeypatch.setattr(torch_impl, "gate", broken)
    assert selftest.main(["--device", "cpu", "--op", "gated_delta_rule", "--json", str(tmp_path / "out.json")]) == 1
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    results = [result for result in results if result["backend"] == "torch"]
    assert all(not result["passed"] and result["error"] is None for result in results
               if result["case"] == "gate" and result["output"] in ("", "g"))
    assert any(result["case"] == "gate" for result in results)
    assert all(result["passed"] for result in results if result["case"] != "gate")
    if fault == "raises":
        assert "no such instruction" in results[0]["note"]


def test_a_back_end_that_cannot_run_here_is_named_and_no_failure(monkeypatch, capsys):
    monkeypatch.setattr(torch_impl, "unavailable", lambda: "no such card", raising=False)
    assert selftest.main(["--device", "cpu", "--op", "gated_delta_rule"]) == 0
    out = capsys.readouterr().out
    assert "gated_delta_rule / gate / torch  not run: gated_delta_rule: back end 'torch' cannot run here" in out


def test_float16_that_this_torch_cannot_multiply_is_named_and_no_failure(monkeypatch, capsys):
    right = torch_impl.gate

    def no_half(a, **rest):
        if a.dtype == torch.float16:
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")
        return right(a, **rest)

    monkeypatch.setattr(torch_impl, "gate", no_half)
    assert selftest.main(["--device", "cpu", "--op", "gated_delta_rule"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "/ gate /" in line]
    assert len([line for line in lines if "float16 not run: \"addmm_impl_cpu_\"" in line]) == 1, lines
    # Two outputs in each of the other two.
    assert len([line for line in lines if "  torch  " in line and "tolerance" in line]) == 4, lines


@pytest.mark.parametrize("arguments, message", [(["--op", "vision"], "invalid choice"),
                                                (["--device", "tpu"], "invalid choice")])
def test_a_wrong_command_line_is_exit_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        selftest.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is for machines without one")
def test_a_device_that_is_not_there_is_exit_2(capsys):
    with pytest.raises(SystemExit) as stop:
        selftest.main(["--device", "cuda"])
    assert stop.value.code == 2 and "torch sees no CUDA device" in capsys.readouterr().err
