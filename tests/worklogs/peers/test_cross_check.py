"""The cross-check: what the schedule says by each definition of an end, and whom it believes."""
import json
import sqlite3
import sys

import pytest

from worklogs import stub_server
from worklogs.peers import cross_check
from worklogs.peers.cross_check import Progress, tools
from worklogs.stub_server import answer

QUICK = [answer(0.05, 0.03, 4, 100, 0), stub_server.EXAMPLE[0]]


def entry(recording, number):
    """A log entry of a stub that was never late."""
    chunks = recording[number]["chunks"]
    return {"recording": number, "received_s": 10.0, "flushed_s": [10.0 + offset for offset, _ in chunks]}


def test_the_schedule_by_each_definition_of_an_end():
    """The example's first answer: thought at 0.5, two events at 0.7, one that is split and ends at 1.0, a call at 1.1,
    the finish at 1.3, usage with the end at 1.5."""
    for end, whole in ((tools.LAST_BYTE, 1500), (tools.LAST_EVENT, 1500), (tools.LAST_OUTPUT, 1100)):
        found = cross_check.truth(entry(stub_server.EXAMPLE, 0), stub_server.EXAMPLE, end)
        assert (found.prompt, found.completion, found.cached, found.reasoning) == (1000, 6, 640, 1)
        assert found.ttft_ms == pytest.approx(500) and found.whole_ms == pytest.approx(whole)
        assert found.per_token_ms == pytest.approx((whole - 500) / 5)
        assert found.steps_ms == pytest.approx([200, 0, 300, 100])


def test_who_is_within():
    true = cross_check.truth(entry(QUICK, 0), QUICK, tools.LAST_BYTE)
    off = {name: getattr(true, name) for name in ("ttft_ms", "whole_ms", "per_token_ms", "prompt", "completion")}
    good = cross_check.judged(true, tools.Figures(**{**off, "ttft_ms": true.ttft_ms + 1.9}, steps_ms=None))
    assert good == {"tokens": True, "within": True,
                    "off_ms": {"ttft_ms": 1.9, "whole_ms": 0.0, "per_token_ms": 0.0, "steps_ms": None}}
    assert not cross_check.judged(true, tools.Figures(**{**off, "ttft_ms": 53}, steps_ms=None))["within"]
    late = cross_check.judged(true, tools.Figures(**off, steps_ms=[30, 33, 27]))
    assert not late["within"] and abs(late["off_ms"]["steps_ms"]) == pytest.approx(3)
    assert not cross_check.judged(true, tools.Figures(**off, steps_ms=[30, 30]))["within"], "a step is missing"
    assert not cross_check.judged(true, tools.Figures(**{**off, "completion": 5}, steps_ms=None))["tokens"]


def test_ours_agrees_on_the_tokens_and_its_runs_are_kept(tmp_path, capsys):
    """Its times are what tests/worklogs/test_formal_perf_bench.py is for."""
    found = cross_check.check([tools.OURS], 1, tmp_path, 60, Progress(1, False), QUICK)["ours"]
    print(cross_check.shown({"ours": found}))
    assert found["tokens_exact"] and found["requests"] == 4 and found["runs"] == 1
    [run] = found["attempts"]
    assert [row["answer"] for row in run["requests"]] == [0, 1, 0, 1] and run["stub_late_ms"]["max"] >= 0
    for row in run["requests"]:
        assert row["said"]["ttft_ms"] > row["true"]["ttft_ms"] > 0, "shorter than it was"
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("ours: ") and "tokens exact" in line and "of 4 requests within the limits, 1 runs" in line


def test_a_tool_that_tells_other_times_disagrees(tmp_path):
    """Ours, with a stand-in that adds 50 ms, and one that finds an answer too few."""
    def slow(folder):
        return [tools.Figures(one.ttft_ms + 50, one.whole_ms, one.per_token_ms, None, one.prompt, one.completion)
                for one in tools.OURS.read(folder)]

    liar = tools.Tool("liar", tools.LAST_BYTE, tools.OURS.command, slow, tools.OURS.program)
    found = cross_check.check([liar], 1, tmp_path / "one", 60, Progress(1, False), QUICK)["liar"]
    assert not found["agrees"] and found["runs"] == 1 and found["within"] == 0 and found["tokens_exact"]
    assert found["off_ms"]["ttft_ms"]["median"] > 45 and found["off_ms"]["steps_ms"] is None
    short = tools.Tool("short", tools.LAST_BYTE, tools.OURS.command, lambda folder: slow(folder)[1:],
                       tools.OURS.program)
    with pytest.raises(tools.ToolError, match="short tells of 3 requests, not of 4"):
        cross_check.check([short], 1, tmp_path / "two", 60, Progress(1, False), QUICK)


def test_what_the_others_wrote_is_read(tmp_path):
    folder = tmp_path / "20261202" / "llm"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "benchmark_data.db") as connection:
        connection.execute("CREATE TABLE result(start_time REAL, inter_token_latencies TEXT, success INTEGER, "
                           "latency REAL, first_chunk_latency REAL, prompt_tokens INTEGER, completion_tokens INTEGER, "
                           "time_per_output_token REAL)")
        connection.executemany("INSERT INTO result VALUES(?, ?, 1, ?, ?, ?, ?, ?)", [
            (2.0, "[0.1]", 0.5, 0.25, 7, 2, 0.25), (1.0, "[]", 0.3, 0.125, 6, 1, 0.0)])
    connection.close()
    assert tools.EVALSCOPE.read(tmp_path) == [tools.Figures(125.0, 300.0, 0.0, [], 6, 1),
                                              tools.Figures(250.0, 500.0, 250.0, [100.0], 7, 2)]

    def record(start, **metrics):
        return json.dumps({"metadata": {"request_start_ns": start}, "metrics": {
            name: {"value": value, "unit": unit} for name, (value, unit) in metrics.items()}}) + "\n"

    metrics = {"time_to_first_token": (1.5, "ms"), "request_latency": (9.5, "ms"), "inter_token_latency": (4.0, "ms"),
               "inter_chunk_latency": ([4.0, 4.0], "ms"), "input_sequence_length": (7, "tokens"),
               "output_sequence_length": (3, "tokens"), "usage_prompt_cache_read_tokens": (5, "tokens")}
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "profile_export.jsonl"
    path.write_text(record(2, **metrics) + record(1, **{**metrics, "input_sequence_length": (6, "tokens")}))
    found = tools.AIPERF.read(tmp_path)
    assert found[1] == tools.Figures(1.5, 9.5, 4.0, [4.0, 4.0], 7, 3, 5) and found[0].prompt == 6
    path.write_text(record(1, **{**metrics, "request_latency": (9.5, "s")}))
    with pytest.raises(ValueError, match="request_latency is in s"):
        tools.AIPERF.read(tmp_path)


def test_a_tool_that_is_missing_or_fails_is_one_line(tmp_path, monkeypatch, capsys):
    gone = tools.Tool("evalscope", tools.LAST_EVENT, tools.EVALSCOPE.command, tools.EVALSCOPE.read, tmp_path / "none",
                      "evalscope")
    monkeypatch.setitem(tools.TOOLS, "evalscope", gone)
    assert cross_check.main(["--tools", "evalscope", "--no-keep", "--no-progress"]) == 1
    assert capsys.readouterr().err.strip() == (
        "cross_check: evalscope is not installed: bash worklogs/peers/setup.sh evalscope")
    fails = tools.Tool("ours", tools.LAST_BYTE, lambda *_: [sys.executable, "-c", "raise SystemExit('no reason')"],
                       tools.OURS.read, tools.OURS.program)
    monkeypatch.setitem(tools.TOOLS, "ours", fails)
    assert cross_check.main(["--tools", "ours", "--no-keep", "--no-progress"]) == 1
    assert capsys.readouterr().err.splitlines() == ["cross_check: ours ended with 1", "no reason"]
    with pytest.raises(SystemExit):
        cross_check.main(["--tools", "wrk"])
