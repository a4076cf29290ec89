"""The benchmark says of a cache that is known exactly what is true of it, and keeps what it measured."""
import json
import os
import subprocess
import sys
import time

import pytest

from tests.worklogs.cache_stub import CacheStub
from worklogs import bench_record, prefix_cache_bench
from worklogs.bench_client import OthersMeter


@pytest.fixture
def stub(request):
    server = CacheStub(**getattr(request, "param", {}))
    yield server
    server.shutdown()
    server.server_close()


def run(stub, folder, *arguments):
    """Exit status, and the record."""
    status = prefix_cache_bench.main(["--base-url", stub.url, "--no-progress", "--out", str(folder), *arguments])
    (path, ) = folder.iterdir()
    return status, json.loads(path.read_text())


def test_a_cache_of_small_blocks_meets_every_row(stub, tmp_path, capsys):
    rows = [word for name in ("second", "prefix", "interleaved", "branch") for word in ("--row", name)]
    status, record = run(stub, tmp_path, *rows, "--server-command", "serve --model /tmp/somewhere/slice --port 1")
    print(capsys.readouterr().out)
    assert status == 0 and record["failure"] is None and record["version"] == "stub"
    assert {name: (table["summary"]["cases"], table["summary"]["met"]) for name, table in record["tables"].items()} == {
        "second": (35, 35), "prefix": (12, 12), "interleaved": (3, 3), "branch": (16, 16)}
    for length, one in zip(prefix_cache_bench.LENGTHS, record["tables"]["second"]["rows"], strict=True):
        assert (one["prompt"], one["reusable"], one["cached"]) == (length, length - 1, (length - 1) // 16 * 16)
        assert one["first_cached"] == 0, "prompts of one run share a beginning"
    assert prefix_cache_bench.LENGTHS[0] == 20 and prefix_cache_bench.LENGTHS[-1] == 5000
    assert record["server_command"] == "serve --model slice --port 1"
    assert os.uname().nodename not in json.dumps(record) and str(tmp_path) not in json.dumps(record)


@pytest.mark.parametrize("stub", [{"block": 1000}], indirect=True)
def test_a_cache_of_large_blocks_does_not(stub, tmp_path):
    status, record = run(stub, tmp_path, "--row", "second")
    summary = record["tables"]["second"]["summary"]
    lengths = prefix_cache_bench.LENGTHS
    assert status == 0
    assert summary["hits"] == sum(length > 1000 for length in lengths)
    assert summary["met"] == sum(length <= 80 or (length - 1) % 1000 <= 64 for length in lengths)
    assert summary["most_lost"] == max((length - 1) % 1000 for length in lengths)


@pytest.mark.parametrize("stub", [{"silent": True}], indirect=True)
def test_a_server_that_says_nothing_is_not_called_cold(stub, tmp_path):
    _, record = run(stub, tmp_path, "--row", "interleaved")
    assert [one["cached"] for one in record["tables"]["interleaved"]["rows"]] == [None] * 3
    assert record["tables"]["interleaved"]["summary"]["hits"] == 0
    assert all(one["met"] is None for one in record["tables"]["interleaved"]["rows"])


def test_llama_cpp_counts_are_read_from_its_timings(stub, tmp_path):
    _, record = run(stub, tmp_path, "--row", "interleaved", "--kind", "llama", "--server-version", "11434")
    assert record["tables"]["interleaved"]["rows"][0]["cached"] == 2500 // 16 * 16 + 1
    assert record["version"] == "11434" and all(body["cache_prompt"] for body in stub.bodies)


def test_chat_rows_know_what_a_template_keeps(stub, small_folder):
    """A cache that finds every whole block loses less than one of what the template keeps, whatever that is."""
    renderer = prefix_cache_bench.Renderer(str(small_folder))

    class Rendering:
        def chat(self, messages, thinking, tools):
            ids = renderer.ids(messages, thinking, tools)
            return prefix_cache_bench.Answer(len(ids), stub.cached(ids), 0.0)

    rows = list(prefix_cache_bench.chat(Rendering(), prefix_cache_bench.Prompts("salt", 8000), renderer))
    print(*rows, sep="\n")
    assert len(rows) == 4 * 9 and all(one["met"] and one["lost"] <= 16 for one in rows)
    kept = [one["reusable"] >= one["last_prompt"] - 16 for one in rows]
    for one, whole in zip(rows, kept, strict=True):
        print(one["case"], one["last_prompt"], one["reusable"], whole)
    # Without tools all of the last prompt is kept; with them not at turns 5 and 9, after a user's turn.
    assert [one["case"] for one, whole in zip(rows, kept, strict=True) if not whole] == [
        f"thinking {state}, tools, turn {turn}" for state in ("on", "off") for turn in (5, 9)]


@pytest.mark.parametrize("stub", [{"fail_after": 12}], indirect=True)
def test_what_was_measured_before_a_failure_is_kept(stub, tmp_path, capsys):
    status, record = run(stub, tmp_path, "--row", "second")
    rows = record["tables"]["second"]["rows"]
    assert status == 1 and "500" in record["failure"] and "500" in capsys.readouterr().err
    assert len(rows) == 6 and "failed" in rows[-1] and record["tables"]["second"]["summary"]["failed"] == 1


def test_warm_rounds(stub, tmp_path):
    _, record = run(stub, tmp_path, "--row", "warm", "--rounds", "3")
    samples = record["warm"]["samples"]
    assert [sample["kind"] for sample in samples] == ["cold", "warm", "step"] * 4
    assert [sample["prompt"] for sample in samples[:3]] == [8000, 8020, 8020 - 7984]
    assert [sample["cached"] for sample in samples[:3]] == [0, 7984, 0]
    assert [sample["counted"] for sample in samples] == [False] * 3 + [True] * 9
    assert record["warm"]["cold"]["count"] == 3 and record["warm"]["met"] in (True, False)


def samples_of(cold, warm, step, counted=True):
    return [{"kind": kind, "seconds": seconds, "counted": counted}
            for kind, seconds in (("cold", cold), ("warm", warm), ("step", step)) for _ in range(3)]


def test_the_limit_of_a_warm_prompt():
    judge = prefix_cache_bench.judge
    assert judge(samples_of(10.0, 0.49, 0.1))["met"] is True           # 5 % of cold
    assert judge(samples_of(1.0, 0.49, 0.4))["met"] is True            # 1.3 steps
    assert judge(samples_of(1.0, 0.49, 0.3))["met"] is False
    found = judge(samples_of(10.0, 0.5, 0.25))
    assert (found["of_cold"], found["of_step"], found["limit_seconds"]) == (0.05, 2.0, 0.5)
    assert judge(samples_of(10.0, 0.1, 0.1, counted=False))["met"] is None


def test_others_load_is_told_from_the_servers():
    code = "import time\nend = time.time() + 20\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as busy, subprocess.Popen(["sleep", "20"]) as idle:
        its_server, another = OthersMeter(busy.pid), OthersMeter(idle.pid)
        its_server.start()
        another.start()
        time.sleep(1.0)
        without, with_it = its_server.cores(), another.cores()
        busy.kill()
        idle.kill()
    # What a process that has gone had used would count as others'.
    assert its_server.cores() is None
    print(f"others use {without} cores beside the busy process, {with_it} with it")
    assert without is not None and with_it is not None and with_it - without > 0.1
    assert OthersMeter(None).cores() is None


@pytest.mark.parametrize(("arguments", "words"), [
    (["--base-url", "http://127.0.0.1:1"], "ConnectionRefusedError"),
    (["--base-url", "ftp://127.0.0.1:1"], "--base-url ftp://127.0.0.1:1 is not"),
    (["--row", "chat"], "--tokenizer"),
])
def test_bad_input_is_one_line(stub, arguments, words, tmp_path, capsys):
    assert prefix_cache_bench.main(["--base-url", stub.url, "--row", "second", "--no-progress", "--out", str(tmp_path),
                                    *arguments]) == 1
    error = capsys.readouterr().err.strip()
    assert words in error and "\n" not in error and not list(tmp_path.iterdir())


def test_records_are_written_once_and_name_no_path(tmp_path, monkeypatch):
    path = bench_record.keep("some-name", {"kind": "k"}, tmp_path)
    assert path.name[15:] == "_some-name.json" and json.loads(path.read_text())["kind"] == "k"
    with pytest.raises(ValueError, match="Some Name"):
        bench_record.keep("Some Name", {"kind": "k"}, tmp_path)

    class Slow(bench_record.datetime.datetime):
        moments = iter([(5, 100_000), (5, 400_000), (6, 0)])

        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, *next(cls.moments), tzinfo=tz)

    slept: list[float] = []
    monkeypatch.setattr(bench_record.datetime, "datetime", Slow)
    monkeypatch.setattr(bench_record.time, "sleep", slept.append)
    first, second = (bench_record.keep("twice", {"kind": "k", "n": n}, tmp_path) for n in (1, 2))
    assert (first.name, second.name) == ("20260102-030405_twice.json", "20260102-030406_twice.json")
    assert [json.loads(path.read_text())["n"] for path in (first, second)] == [1, 2] and slept == [pytest.approx(0.6)]
    assert bench_record.without_paths(["python", "/a/b/c.py", "--x=/root/y", "http://127.0.0.1:1/v1", "a/b"]) == \
        "python c.py --x=y http://127.0.0.1:1/v1 a/b"
