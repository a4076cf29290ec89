"""Steps are told from stamps, and a server whose schedule is known is measured as it is."""
import json
import time

import pytest

from tests.helpers.server_process import free_port
from tests.worklogs.stub_process import stub
from worklogs import decode_microbench, ledger, replay_sim
from worklogs.decode_microbench import micro_tables, steps
from worklogs.stub_server import answer, delta, usage

STEP = 0.02
ATTEMPTS = 4


def run(url, out, *more, batch="1", context="0", rounds="1"):
    """(exit status, record or None)."""
    status = decode_microbench.main(["--base-url", url, "--kind", "stub", "--out", str(out), "--no-progress",
                                     "--batch", batch, "--context", context, "--rounds", rounds, *more])
    found = sorted(out.glob("*.json")) if out.exists() else []
    return status, json.loads(found[-1].read_text()) if found else None


def test_steps_of_stamps_by_hand():
    # The second answer begins later; what the first did alone, at another pace, is left out.
    first = [0.0, 0.01, 0.02, 0.1, 0.2, 0.3, 0.4, 0.5]
    second = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    found = steps.measured([first, second], [8, 6])
    print(found)
    assert found["step_s"]["p50"] == pytest.approx(0.1) and found["gaps"] == 8
    assert found["window_s"] == pytest.approx(0.4) and found["aggregate_tps"] == pytest.approx(20.0)
    assert found["tokens_per_step"] == 1.0 and found["token_s"] == pytest.approx(0.1)
    assert found["stream_tps"] == pytest.approx((7 / 0.5 + 5 / 0.5) / 2)
    # Two tokens at once: the step is what it was, a token takes half of it.
    guessed = steps.measured([second], [12])
    assert guessed["tokens_per_step"] == 2.0 and guessed["token_s"] == pytest.approx(0.05)
    assert guessed["step_s"]["p50"] == pytest.approx(0.1) and guessed["aggregate_tps"] == pytest.approx(20.0)
    silent = steps.measured([second], [None])
    assert silent["tokens_per_step"] is silent["aggregate_tps"] is silent["stream_tps"] is None
    assert silent["step_s"]["p50"] == pytest.approx(0.1)


@pytest.mark.parametrize("stamps", [[[0.0, 0.1, 0.2, 0.3], [0.4, 0.5, 0.6, 0.7]], [[0.0], [0.0, 0.1]],
                                    [[0.0, 0.1, 0.2]]])
def test_answers_that_did_not_run_together_are_no_measurement(stamps):
    with pytest.raises(steps.NotTogether):
        steps.measured(stamps, [4] * len(stamps))


def sample(context, batch, step, cached=990, tokens_per_step=1.0, turn=0):
    request = {"ttft_s": 0.05, "class": "ok", "prompt_tokens": context + 10, "cached_tokens": cached,
               "completion_tokens": 20, "deltas": 20, "finish": "length"}
    return {"round": turn, "context": context, "batch": batch, "class": "ok", "error": None,
            "primes": [{**request, "cached_tokens": 0, "ttft_s": 0.5}] if batch == 1 and context else [],
            "requests": [request] * batch, "client": {"loop_lag_ms": {"p50": 0.1, "p99": 0.2, "max": 1.0 + turn},
                                                      "healthy": True},
            "step_s": {"p10": step * 0.9, "p50": step, "p90": step * 1.2}, "gaps": 19 * batch, "window_s": 19 * step,
            "tokens_per_step": tokens_per_step, "token_s": step, "stream_tps": 1 / step, "aggregate_tps": batch / step}


def test_rows_are_medians_over_rounds_and_points_can_be_fitted(tmp_path):
    samples = [sample(context, batch, (0.03 + 0.004 * batch + 2e-7 * batch * (context + 20)) * (1 + turn / 100),
                      cached=context, turn=turn) for turn in range(3) for context in (0, 1000, 8000)
               for batch in (1, 4)]
    found = steps.rows(samples)
    assert [(row["context"], row["batch"]) for row in found] == [(0, 1), (0, 4), (1000, 1), (1000, 4), (8000, 1),
                                                                 (8000, 4)]
    first = found[0]
    assert first["rounds"] == 3 and first["loop_lag_ms"] == 3.0 and first["uneven"] is False
    step = 0.034 + 2e-7 * 20
    assert [first["step_s"][name] for name in ("least", "p50", "most")] == pytest.approx(
        [step, step * 1.01, step * 1.02])
    record = {"points": steps.points(found, samples)}
    assert {"what": "ttft", "prompt": 1010, "cached": 0, "seconds": 0.5} in record["points"]
    (tmp_path / "r.json").write_text(json.dumps(record))
    points = tmp_path / "points.json"
    assert replay_sim.main(["points", str(tmp_path / "r.json"), "--chunk", "2048", "-o", str(points)]) == 0
    contents, read = replay_sim.cost_model.read(points)
    costs = replay_sim.cost_model.fit(contents, [point for point in read if "step" in point.words]).costs.values
    print(costs)
    assert costs["step"] == pytest.approx(0.03 * 1.01, rel=1e-3)
    assert costs["decode_token"] == pytest.approx(0.004 * 1.01, rel=1e-2)
    assert costs["decode_context"] == pytest.approx(2e-7 * 1.01, rel=1e-2)


def test_points_have_their_tokens_and_are_none_of_what_nobody_should_trust():
    good = sample(0, 1, 0.1, tokens_per_step=2.0) | {"token_s": 0.05}
    assert steps.points(steps.rows([good]), [good])[0] == {
        "what": "step", "batch": 1, "tokens": 2.0, "context": 20, "seconds": 0.1}
    uneven = sample(0, 1, 0.1) | {"token_s": 0.2}
    assert steps.rows([uneven])[0]["uneven"] is True
    assert [point["what"] for point in steps.points(steps.rows([uneven]), [uneven])] == []
    silent = good | {"tokens_per_step": None, "token_s": None}
    assert steps.points(steps.rows([silent]), [silent]) == []
    slow = sample(1000, 1, 0.1) | {"client": {"loop_lag_ms": {"p50": 9, "p99": 9, "max": 900.0}, "healthy": False}}
    assert steps.points(steps.rows([slow]), [slow]) == []


def test_a_known_schedule(tmp_path, capsys):
    """What is sent, and counted, is exact in every run. Times are those of the stub in one run of ATTEMPTS, or the
    machine was too busy to say, which the client's lag shows."""
    proved, lags = set(), []
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        proved |= known_schedule(folder, lags)
        print(capsys.readouterr().out)
        if len(proved) == 4:
            return
    assert min(lags) > 1000 * STEP / 2, "a client that always ran in time has no excuse"
    pytest.skip(f"the machine is too busy to say: the client was late by {lags} ms; only {proved} were right")


def known_schedule(tmp_path, lags):
    """Rows whose step is the stub's."""
    with stub(tmp_path, [answer(0.05, STEP, 12, 1000, 990)]) as (url, log, _):
        status, record = run(url, tmp_path / "out", "--tokens", "12", "--server-command", "serve --model /a/b/slice",
                             batch="1,3", context="0,1K,300K", rounds="2")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert status == 0 and record["ended_early"] is None and record["server"]["command"] == "serve --model slice"
    assert record["skipped"] == [{"context": 300000, "why": "longer than the server's max_model_len 262144"}]
    # One request of each round that makes the prefix known: this server says that it is, at once.
    assert len(entries) == 2 * (2 * (1 + 3) + 1) and not list((tmp_path / "out").glob("*.partial"))
    assert [entry["sent"]["max_tokens"] for entry in entries].count(1) == 2
    assert all(entry["sent"]["ignore_eos"] and entry["sent"]["min_tokens"] == entry["sent"]["max_tokens"]
               for entry in entries)
    # Arms alternate: the second round goes the other way.
    assert [(one["round"], one["context"], one["batch"]) for one in record["samples"]] == [
        (0, 0, 1), (0, 0, 3), (0, 1000, 1), (0, 1000, 3), (1, 1000, 3), (1, 1000, 1), (1, 0, 3), (1, 0, 1)]
    flushed = [later - one for entry in entries for one, later in zip(entry["flushed_s"][1:], entry["flushed_s"][2:],
                                                                      strict=False)]
    middle = sorted(flushed)[len(flushed) // 2]
    proved = set()
    for row in record["rows"]:
        print(row["context"], row["batch"], row["step_s"], "stub", middle)
        if row["step_s"]["p50"] == pytest.approx(middle, rel=0.1):
            proved.add((row["context"], row["batch"]))
        assert row["prompt_tokens"] == 1000 and row["cached_tokens"] == 990 and row["tokens_per_step"] == 1.0
    assert {(point["batch"], point["context"], point["tokens"]) for point in record["points"] if point["what"] == "step"
            } == {(row["batch"], 1006, 1.0) for row in record["rows"] if not row["uneven"] and row["healthy"]}
    if record["client"]["healthy"]:
        assert any(point["what"] == "ttft" and point["cached"] == 990 for point in record["points"])
    path = next((tmp_path / "out").glob("*.json"))
    book = tmp_path / "LEDGER.md"
    book.write_text(f"<!-- table: decode-microbench {path.name} -->\n<!-- end -->\n")
    assert ledger.main(["--ledger", str(book), "--results", str(path.parent)]) == 0
    text = book.read_text()
    assert "| stub stub | 1,000 | 3 | 990 of 1000 | " in text and "skipped: longer than" in text
    lags.append(record["client"]["loop_lag_ms"]["max"])
    return proved


def test_what_is_not_reported_is_not_zero(tmp_path):
    bare = [[0.0, delta(role="assistant", content="")]] + [[STEP * index, delta(content=f"w{index} ")]
                                                           for index in range(1, 10)]
    bare[-1][1] += delta("length") + "data: [DONE]\n\n"
    with stub(tmp_path, [{"status": 200, "chunks": bare}]) as (url, log, _):
        status, record = run(url, tmp_path / "out", "--tokens", "9", context="1K")
    (row, ) = record["rows"]
    assert status == 0 and row["cached_tokens"] is None and row["tokens_per_step"] is row["aggregate_tps"] is None
    assert row["step_s"]["p50"] > 0 and record["points"] == []
    assert len(log.read_text().splitlines()) == 3, "a prefix of which nothing is said is sent twice"
    assert "not reported of not reported" in micro_tables.decode_microbench([record])


def test_failures_are_kept_with_their_reason(tmp_path):
    together = [answer(0.0, 0.01, 9, 10, 0), answer(1.0, 0.01, 9, 10, 0)]
    with stub(tmp_path, together) as (url, _, _):
        status, record = run(url, tmp_path / "out", "--tokens", "9", batch="2")
    assert status == 0 and "never ran together" in record["rows"][0]["failed"][0] and not record["points"]
    assert "failed: not_together" in micro_tables.decode_microbench([record])
    body = json.dumps({"error": {"message": "This model's maximum context length is 10 tokens"}})
    with stub(tmp_path, [answer(0.0, 0.01, 9, 10, 0), {"status": 400, "chunks": [[0.0, body]]}]) as (url, _, _):
        status, record = run(url, tmp_path / "other", "--tokens", "9", context="0,1K", rounds="2")
    assert status == 0 and [one["context"] for one in record["skipped"]] == [1000]
    assert "maximum context length" in record["skipped"][0]["why"]


def test_a_server_that_dies_leaves_what_was_measured_and_can_be_resumed(tmp_path, capsys, monkeypatch):
    port, out = free_port(), tmp_path / "out"
    cut = {"status": 200, "chunks": [[0.0, delta(content="a")], [0.2, None]]}
    options = ("--tokens", "9", "--timeout", "20")
    plain = answer(0.0, 0.01, 9, 10, 0)
    with stub(tmp_path, [plain, plain, plain, cut], port) as (url, _, process):
        listens = decode_microbench.Client.listens

        async def gone(self):
            process.kill()
            process.wait()
            return await listens(self)

        with monkeypatch.context() as patched:
            patched.setattr(decode_microbench.Client, "listens", gone)
            status, record = run(url, out, *options, batch="1,2", rounds="2")
    error = capsys.readouterr().err
    assert status == 3 and "went away at context 0, batch 2" in error and "--resume" in error
    assert len(record["samples"]) == 2 and record["ended_early"]
    with stub(tmp_path, [plain], port) as (url, log, _):
        before = len(log.read_text().splitlines())
        assert run(url, out, *options, batch="1,2", rounds="2")[0] == 1, "an unfinished run is not overwritten"
        assert "--resume goes on with it" in capsys.readouterr().err
        assert run(url, out, *options, "--resume", batch="1", rounds="2")[0] == 1
        assert "batch differ" in capsys.readouterr().err
        time.sleep(1.1)     # Records are named by the second.
        status, record = run(url, out, *options, "--resume", batch="1,2", rounds="2")
        assert len(log.read_text().splitlines()) - before == 2 + 1
    assert status == 0 and len(record["samples"]) == 4 and record["sittings"] == 2
    assert not list(out.glob("*.partial"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """URL of a stub that answers all alike."""
    with stub(tmp_path_factory.mktemp("plain"), [answer(0.0, 0.01, 9, 10, 0)]) as (url, _, _):
        yield url


@pytest.mark.parametrize(("arguments", "words"), [
    (["--base-url", "http://127.0.0.1:1"], "connection"), (["--base-url", "ftp://x"], "ftp://x is not"),
    (["--model", "other"], "--model other: the server has llm"),
    (["--context", "300K"], "nothing was measured: context 300,000: longer than"),
])
def test_bad_input_is_one_line(plain, arguments, words, tmp_path, capsys):
    assert decode_microbench.main(["--base-url", plain, "--out", str(tmp_path / "out"), "--no-progress",
                                   *arguments]) == 1
    error = capsys.readouterr().err.strip()
    assert words in error and "\n" not in error and not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--batch", "two"], ["--context", "1M"], ["--tokens", "3"],
                                       ["--name", "Bad Name"], ["--set", "a=b"]])
def test_a_bad_command_line(arguments):
    with pytest.raises(SystemExit) as error:
        decode_microbench.parse(arguments)
    assert error.value.code == 2


def test_usage_stands_for_speculation(tmp_path):
    chunks = [[STEP * index, delta(content=f"w{index} x{index} ")] for index in range(1, 9)]
    chunks[-1][1] += delta("length") + usage(50, 16, 0) + "data: [DONE]\n\n"
    with stub(tmp_path, [{"status": 200, "chunks": chunks}]) as (url, _, _):
        _, record = run(url, tmp_path / "out", "--tokens", "16")
    assert record["rows"][0]["tokens_per_step"] == 2.0
