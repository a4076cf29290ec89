"""A start is the platform's with what is overridden, its phases are those of the log, and nothing is left behind."""
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import yaml

from tests.helpers.server_process import free_port
from worklogs import ledger, startup_bench
from worklogs.startup_bench import page_cache, platform_start, start_log

ROOT = Path(__file__).resolve().parents[2]
SUBMITTED = ROOT / "computility-run.yaml"
FAKE = Path(__file__).with_name("fake_start.py")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A checkpoint of nothing and a file that starts the fake server."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"0" * 100_000)
    for name in platform_start.NAMES:
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"command": [sys.executable, str(FAKE), "--model", "/nowhere", "--port", "1"],
                                    "env": [{"name": "FAKE_FAIL", "value": ""}], "concurrency": 1}))
    return tmp_path, ["--yaml", str(file), "--out", str(tmp_path / "out"), "--topic", "try", "--no-progress",
                      "--patience", "10", f"MODEL={model}", f"PORT={free_port()}"]


def run(world, *more):
    """(exit status, record, its folder)."""
    status = startup_bench.main([*world[1], *more])
    found = sorted((world[0] / "out").glob("*/*.json"))
    return status, json.loads(found[-1].read_text()) if found else None, found[-1].parent if found else None


def plan(**environment):
    return platform_start.plan(SUBMITTED, (), environment)


def test_without_overrides_it_is_what_is_submitted():
    found, document = plan(PATH="/bin", HOME="/root"), yaml.safe_load(SUBMITTED.read_text())
    assert found.command == document["command"] and found.overridden == [] and found.port == 8000
    assert found.environment == {"PATH": "/bin", "HOME": "/root", **{one["name"]: one["value"]
                                                                    for one in document["env"]}}


def test_overrides_take_the_place_of_what_is_there_and_others_are_added():
    before = yaml.safe_load(SUBMITTED.read_text())["command"]
    found = plan(MAX_MODEL_LEN="245000", TENSOR_PARALLEL_SIZE="1", GPU_MEMORY_UTILIZATION="0.85", PORT="8123",
                 CHECKPOINT_MEMORY="2GiB", ENABLE_PREFIX_CACHING="0", ENFORCE_EAGER="1", DISABLE_LOG_REQUESTS="1",
                 EXTRA_ARGS="--seed 3 --host '::1'", PYTHON="python3.10", MOE_DECODE_NATIVE="1", PROF_TRACE="1",
                 VLLM_SOMETHING="x", SWAPPED="1")
    expected = ["python3.10", *before[1:]]
    for option, value in (("--max-model-len", "245000"), ("-tp", "1"), ("--gpu-memory-utilization", "0.85")):
        expected[expected.index(option) + 1] = value
    expected.remove("--enable-prefix-caching")
    assert sorted(found.command) == sorted([*expected, "--port", "8123", "--checkpoint-memory", "2GiB",
                                            "--disable-log-requests", "--seed", "3", "--host", "::1"])
    assert found.command[-4:] == ["--seed", "3", "--host", "::1"] and found.port == 8123
    assert [found.command[at] for at in range(len(expected)) if at < 12] == expected[:12]
    assert found.environment["MOE_DECODE_NATIVE"] == found.environment["PROF_TRACE"] == "1"
    assert "MAX_MODEL_LEN" not in found.environment and found.environment["SWAPPED"] == "1"
    assert found.overridden == sorted([
        "MAX_MODEL_LEN", "TENSOR_PARALLEL_SIZE", "GPU_MEMORY_UTILIZATION", "PORT", "CHECKPOINT_MEMORY",
        "ENABLE_PREFIX_CACHING", "ENFORCE_EAGER", "DISABLE_LOG_REQUESTS", "EXTRA_ARGS", "PYTHON", "MOE_DECODE_NATIVE",
        "PROF_TRACE", "VLLM_SOMETHING"])
    words = platform_start.plan(SUBMITTED, ["MAX_MODEL_LEN=1000"], {"MAX_MODEL_LEN": "2000"})
    assert words.option("--max-model-len") == "1000"


@pytest.mark.parametrize(("environment", "words", "message"), [
    ({"MAX_MODLE_LEN": "1"}, (), "MAX_MODLE_LEN in the environment is no override; did you mean MAX_MODEL_LEN?"),
    ({"MAX_MODEL_LENGTH": "1"}, (), "did you mean MAX_MODEL_LEN?"),
    ({"MOE_DECODE_NATIV": "1"}, (), "did you mean MOE_DECODE_NATIVE?"),
    ({}, ("MAX_SEQS=3", ), "MAX_SEQS is no override; did you mean MAX_NUM_SEQS?"),
    ({}, ("QQ=3", ), "QQ is no override (--help"), ({}, ("max-model-len", ), "'max-model-len' is not NAME=VALUE"),
    ({"MAX_MODEL_LEN": "245K"}, (), "MAX_MODEL_LEN=245K: a whole number"),
    ({"GPU_MEMORY_UTILIZATION": "90"}, (), "GPU_MEMORY_UTILIZATION=90: a share"),
    ({"ENFORCE_EAGER": "yes"}, (), "ENFORCE_EAGER=yes: 1 adds --enforce-eager"),
    ({"EXTRA_ARGS": "'"}, (), "EXTRA_ARGS='"), ({}, ("MAX_NUM_SEQS=", ), "MAX_NUM_SEQS=: a whole number"),
])
def test_a_wrong_override_is_named(environment, words, message):
    with pytest.raises(platform_start.StartError) as error:
        platform_start.plan(SUBMITTED, words, environment)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "message"), [
    (": :", "no YAML"), ("- 1", "command must be"), ("command: [1]", "command must be"),
    ("command: [a]\nenv: [{name: a, value: 1}]", "env must be"), (None, "No such file")])
def test_a_file_that_the_platform_would_not_take(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(platform_start.StartError, match=message):
        platform_start.plan(path, (), {})


def test_a_start_is_measured_and_kept(world, capsys):
    status, record, folder = run(world, "--starts", "2", "FAKE_FAIL=")
    print(capsys.readouterr().out)
    assert status == 0 and folder.name.endswith("-try") and len(record["starts"]) == 2
    for start in record["starts"]:
        times = [phase["at_s"] for phase in start["phases"]]
        print(start["phases"])
        assert [phase["phase"] for phase in start["phases"]] == list(start_log.NAMES)
        assert times == sorted(times) and start["phases"][0]["at_s"] > 0
        assert sum(phase["took_s"] for phase in start["phases"]) == pytest.approx(times[-1], abs=0.01)
        # The lines are 0.12 s apart but for that of the second rank, 0.8 s, which ends the weights.
        weights, cache = (next(phase for phase in start["phases"] if phase["phase"] == name)
                          for name in ("weights loaded", "KV cache made"))
        assert weights["took_s"] > 0.5 > cache["took_s"]
        assert start["server_says"]["Engine up after"] == {
            "whole": 37.7, "process and imports": 34.6, "device and ranks": 0.1, "weights and states": 1.9,
            "KV cache": 0.9}
        assert start["deployed"].startswith("vllm overlay: pin pypi-0.6.3") and start["failure"] is None
        assert start["first_token"]["completion_tokens"] == 8 and start["ended"]["killed"] is False
        assert start["page_cache"] in ("warm", "not measured")
        text = (folder / start["log"]).read_text()
        assert "model='model'" in text and str(world[0]) not in text
    assert record["summary"][0]["starts"] == 2
    assert [name for name in record["overridden"] if not name.startswith("VLLM_")] == ["MODEL", "PORT"]
    assert record["versions"]["python"].startswith("3.") and record["weights_bytes"] == 100_000
    assert str(world[0]) not in json.dumps(record)
    book = world[0] / "LEDGER.md"
    path = next(folder.glob("*.json"))
    book.write_text(f"<!-- table: startup {folder.name}/{path.name} -->\n<!-- end -->\n")
    assert ledger.main(["--ledger", str(book), "--results", str(folder.parent)]) == 0
    assert "| weights loaded | " in book.read_text()


@pytest.mark.parametrize(("how", "phase", "code", "words"), [
    ("plan", "weights loaded", 1, "the memory plan refuses"), ("hang", "HTTP up", None, "no token within 3 s"),
    ("error", "first token", None, "no token came: server_error: broken")])
def test_a_start_that_fails_is_kept_with_its_reason(world, capsys, how, phase, code, words):
    status, record, folder = run(world, "--starts", "3", "--timeout", "3" if how == "hang" else "60",
                                 f"FAKE_FAIL={how}")
    error = capsys.readouterr().err
    failure = record["starts"][-1]["failure"]
    print(failure, error)
    assert status == 3 and len(record["starts"]) == 1, "the first start that fails is the last"
    assert (failure["phase"], failure["exit"]) == (phase, code) and words in error and repr(phase) in error
    assert any("Memory plan" in line for line in failure["last_lines"])
    assert (folder / record["starts"][0]["log"]).exists()
    assert not list((world[0] / "out").glob("*.partial"))
    assert f"failed before: {phase}" in startup_bench.micro_tables.startup([record])


def test_what_does_not_end_is_killed_and_said(world, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_STUBBORN", "1")
    status, record, _ = run(world, "--patience", "1")
    ended = record["starts"][0]["ended"]
    assert status == 0 and ended["killed"] and 1 <= ended["seconds"] < 20
    assert "did not end within 1 s of SIGTERM and was killed" in capsys.readouterr().out


def test_a_server_that_is_kept_goes_on_until_it_is_ended(world, capsys):
    status, record, _ = run(world, "--keep")
    said = capsys.readouterr().out
    group = int(said.rpartition("kill -- -")[2].split()[0])
    try:
        assert status == 0 and record["starts"][0]["ended"] is None
        os.killpg(group, 0)
        port = int(world[1][-1].partition("=")[2])
        assert startup_bench.main(world[1]) == 1
        assert f"port {port} is taken" in capsys.readouterr().err
    finally:
        os.killpg(group, signal.SIGTERM)
        os.waitpid(group, 0)
        (ROOT / ".cache" / "startup" / record["starts"][0]["log"]).unlink()


def test_an_interrupted_series_ends_its_server_and_can_be_resumed(world, capsys):
    command = [sys.executable, str(Path(startup_bench.__file__)), *world[1], "--starts", "2"]
    partial = world[0] / "out" / "try.startup.partial"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("start 2 of 2"):
                time.sleep(0.3)
                break
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=60)[1]
    print(error)
    assert process.returncode == 130 and "after 1 of 2 starts; --resume goes on" in error and partial.exists()
    assert startup_bench.main([*world[1], "--starts", "2"]) == 1
    assert "--resume goes on with it" in capsys.readouterr().err
    assert startup_bench.main([*world[1], "--starts", "2", "--resume", "MAX_NUM_SEQS=1"]) == 1
    assert "is of another run" in capsys.readouterr().err
    status, record, _ = run(world, "--starts", "2", "--resume")
    assert status == 0 and [start["index"] for start in record["starts"]] == [0, 1] and not partial.exists()
    assert record["sittings"] == 2
    assert capsys.readouterr().out.count("start 1 of 2") == 0


@pytest.mark.parametrize(("word", "message"), [
    ("MODEL=/nowhere/else", "there is no checkpoint at /nowhere/else"),
    ("PYTHON=/nowhere/python", "name an interpreter"),
    ("CHAT_TEMPLATE=/nowhere/x.jinja", "there is no chat template")])
def test_what_is_not_there_is_said_before_anything_starts(world, capsys, word, message):
    assert run(world, word)[0] == 1
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error and not (world[0] / "out").exists()


def test_the_page_cache_is_told_where_it_can_be(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(os.urandom(1 << 20))
    os.sync()
    assert page_cache.weights(tmp_path) == [path] and page_cache.weights(tmp_path / "none") == []
    assert page_cache.resident([path]) == 1.0 and page_cache.resident([]) is None
    page_cache.drop([path])
    left = page_cache.resident([path])
    print("left after a drop:", left)       # A file system may keep them (tmpfs does).
    assert left is not None and 0 <= left <= 1
    path.read_bytes()
    assert page_cache.resident([path]) == 1.0
    assert [page_cache.state(share) for share in (None, 0.0, 0.5, 1.0)] == ["not measured", "cold", "mixed", "warm"]


def test_logs_lose_what_names_the_machine(monkeypatch):
    monkeypatch.setattr(start_log.os, "uname", lambda: types.SimpleNamespace(nodename="node-7"))
    text = start_log.cleaned("File \"/a/b/c.py\", line 3\ntcp://10.2.3.4:99 127.0.0.1:80 on node-7\nmodel='/x/y/z'")
    assert text.split("\n") == ['File "c.py", line 3', "tcp://ADDRESS:99 127.0.0.1:80 on HOST", "model='z'"]


@pytest.mark.parametrize(("text", "code", "words"), [
    ("No module named 'vllm._version'\nvllm: error: --tool-call-parser wrong is not known", 1,
     "change the override or the setting that its last words name (vllm: error: --tool-call-parser wrong"),
    ("python: Error while finding module: No module named 'vllm'", 1, "this interpreter has no vLLM"),
    ("vllm overlay: pin x; back ends: attention y\nRuntimeError: CUDA out of memory", 1, "memory was used up"),
    ("vllm overlay: pin x; back ends: attention y", None, "it hung"), ("", -9, "it was killed"),
    ("", -11, "it died by signal 11"), ("vllm overlay: worker.py is not what was deployed", 1, "patch_ops.sh status"),
    ("vllm: error: cannot listen on 0.0.0.0 port 8000: in use", 1, "another process has the port"), ("x", 1, "look at"),
])
def test_what_can_be_done_is_told_from_the_reason(text, code, words):
    assert words in start_log.advice(text, code)


def test_the_front_lists_the_overrides():
    script = ROOT / "worklogs/remote_scripts/start_platform_245k_repro.sh"
    done = subprocess.run(["bash", str(script), "--help"], text=True, capture_output=True,
                          env={**os.environ, "BENCH_PYTHON": sys.executable})
    assert done.returncode == 0 and os.access(script, os.X_OK)
    lacking = subprocess.run(["bash", str(script)], text=True, capture_output=True,
                             env={**os.environ, "BENCH_PYTHON": "/nowhere/python"})
    assert lacking.returncode == 1 and "give BENCH_PYTHON=" in lacking.stderr and lacking.stderr.count("\n") == 1
    assert all(name in done.stdout for name in (*platform_start.NAMES, "--max-model-len", "--starts"))
