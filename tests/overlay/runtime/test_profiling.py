"""PROF_TRACE and PROF_MOE_SUMMARY: what is refused, written and logged, and that nothing happens without them."""
import gc
import gzip
import json
import re

import pytest
import torch

from tests.helpers.tiny_models import greedy, make_engine, run
from tests.models.conftest import flatter
from tests.models.shapes import moe, prompt, text
from vllm.overlay.runtime import moe_summary, profiling, step_trace
from vllm.overlay.runtime.moe_summary import MoeSummary
from vllm.overlay.runtime.profiling import Profiling
from worklogs.random_checkpoint import write_checkpoint

NUMBER = r"\d+\.\d{3}"
AVERAGES = " ".join(f"{piece}_avg_ms={NUMBER}" for piece in ("gate", "routed", "shared", "all_reduce"))


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for variable in ("PROF_TRACE", "PROF_TRACE_DIR", "PROF_MOE_SUMMARY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def said(monkeypatch):
    lines = []
    for module in (profiling, moe_summary, step_trace):
        for level in ("info", "warning", "error"):
            monkeypatch.setattr(module.logger, level, lambda message, *args: lines.append(message % args))
    return lines


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiling") / "moe"
    config = {**text(64, 4, 4, (4, 2, 32), (2, 4, 16, 16), 4, 0.5, **moe(4, 2, 24, 40)), "dtype": "float32",
              "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
    write_checkpoint(folder, config, seed=3, adjust=flatter)
    return folder


@pytest.mark.parametrize(("environment", "eager", "message"), [
    ({"PROF_TRACE": "-1"}, True, "PROF_TRACE=-1: must be a whole number or empty"),
    ({"PROF_TRACE": "two"}, True, "PROF_TRACE=two: must be a whole number or empty"),
    ({"PROF_TRACE": "3", "PROF_TRACE_DIR": "/no/such"}, True,
     "PROF_TRACE_DIR=/no/such: no folder that can be written to"),
    ({"PROF_MOE_SUMMARY": "yes"}, True, "PROF_MOE_SUMMARY=yes: must be 0, 1 or empty"),
    ({"PROF_MOE_SUMMARY": "1"}, False, "PROF_MOE_SUMMARY=1: it needs --enforce-eager: .*"),
])
def test_what_is_refused(environment, eager, message, monkeypatch):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^{message}$"):
        Profiling.asked(eager)


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_changed_without_them(value, monkeypatch, said):
    monkeypatch.setenv("PROF_TRACE", value)
    monkeypatch.setenv("PROF_MOE_SUMMARY", value)
    monkeypatch.setenv("PROF_TRACE_DIR", "/no/such")
    runner = object()
    Profiling.asked(False).attach(runner, 0)
    assert said == []


def test_an_engine_with_both(checkpoint, tmp_path, monkeypatch, said):
    """The same tokens as without; a trace of three steps; a report of four steps, and at the end."""
    prompts = [prompt(length) for length in (5, 30)]
    plain = make_engine(checkpoint)
    assert "execute_model" not in vars(plain.model_executor.driver_worker.model_runner)
    expected = [output.outputs[0].token_ids for output in run(plain, prompts, greedy(12))]
    assert said == []
    monkeypatch.setattr(moe_summary, "STEPS", 4)
    for variable, value in (("PROF_TRACE", "3"), ("PROF_TRACE_DIR", str(tmp_path)), ("PROF_MOE_SUMMARY", "1")):
        monkeypatch.setenv(variable, value)
    engine = make_engine(checkpoint)
    assert len(said) == 2 and all("rank 0" in line for line in said), said
    assert [output.outputs[0].token_ids for output in run(engine, prompts, greedy(12))] == expected
    assert not any(layer.mlp.moe_summary is None for layer in engine.model_executor.driver_worker.model_runner.model
                   .model.layers)

    path, = tmp_path.iterdir()
    assert re.fullmatch(r"vllm_trace_rank0_\d{8}-\d{6}_\d+\.json\.gz", path.name)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{step}" for step in range(step_trace.WARM_UP, step_trace.WARM_UP + 3)}
    assert any(event.get("name") == "aten::embedding" for event in events)
    written, = (line for line in said if "are in" in line)
    assert written.startswith(f"PROF_TRACE: 3 steps of rank 0 are in {path} (")

    reports = [line for line in said if "the last 4 steps" in line]
    # Both prompts are computed in the first step, by four layers.
    assert [line.rpartition(" ")[2] for line in reports] == ["calls=4", "calls=12", "calls=16", "calls=16"]
    assert ["prefill" in line for line in reports] == [True, False, False, False]
    assert all(re.fullmatch(rf"PROF_MOE_SUMMARY: rank 0, the last 4 steps, \w+: {AVERAGES} calls=\d+", line)
               for line in reports), reports
    del engine
    gc.collect()
    ended = [line for line in said if "all 12 steps" in line]
    assert [line.partition("12 steps, ")[2].split(":")[0] for line in ended] == ["prefill", "decode"], said
    assert [line.rpartition(" ")[2] for line in ended] == ["calls=4", "calls=44"]


class Slow:
    """A layer whose pieces take known times on a device that is only seen to work when it is waited for."""

    def __init__(self):
        self.clock = self.queued = 0.0

    def _launch(self, seconds, result):
        self.queued += seconds
        return result

    def wait(self):
        self.clock, self.queued = self.clock + self.queued, 0.0

    def choose(self, x):
        return self._launch(0.001, (x, x))

    def routed(self, x, weights, ids):
        return self._launch(0.020, x)

    def shared(self, x):
        return self._launch(0.003, x)

    def all_reduce(self, out):
        return self._launch(0.004, out)


def test_a_device_is_waited_for_around_every_piece(said, monkeypatch):
    layer = Slow()
    monkeypatch.setattr(moe_summary.time, "perf_counter", lambda: layer.clock)
    summary = MoeSummary(2, layer.wait)
    assert said.pop().endswith("; the device is waited for around every piece, which costs speed")
    for tokens in (16, 17, 1):
        layer.queued = 5.0
        assert summary.forward(layer, torch.ones(tokens, 2)).tolist() == [[2.0, 2.0]] * tokens
        summary.after_step()
    summary.end()
    averages = "gate_avg_ms=1.000 routed_avg_ms=20.000 shared_avg_ms=3.000 all_reduce_avg_ms=4.000"
    assert said == [f"PROF_MOE_SUMMARY: rank 2, all 3 steps, prefill: {averages} calls=1",
                    f"PROF_MOE_SUMMARY: rank 2, all 3 steps, decode: {averages} calls=2"]


def test_a_trace_that_cannot_be_written_ends_no_step(tmp_path, said):
    folder = tmp_path / "gone"
    folder.mkdir()
    trace = step_trace.StepTrace(1, folder, 1)
    folder.rmdir()
    for _ in range(step_trace.WARM_UP + 3):
        trace.before_step()
        torch.ones(3) + 1
        trace.after_step()
    assert len(said) == 2, said
    assert said[1].startswith(f"PROF_TRACE: the trace of rank 1 cannot be written to {folder}/"), said
