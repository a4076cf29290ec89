"""step_bench.py: arms, ratios by round, and an arm that fails; one test lets it measure the twin."""
import argparse
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "worklogs"))
import step_bench  # noqa: E402
from bench import micro_tables  # noqa: E402


def measured(decode: float, prefill: float) -> dict:
    return {"back_ends": {"moe": "native"}, "decode_s": {"1": decode}, "prefill_s": {"512": prefill}}


def test_an_arm_is_a_name_and_an_environment():
    assert step_bench.arm("default=") == ("default", {})
    assert step_bench.arm("torch=A=1,B=x=y") == ("torch", {"A": "1", "B": "x=y"})
    for text in ("", "default", "=A=1", "torch=A"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=VARIABLE=VALUE"):
            step_bench.arm(text)


def test_ratios_are_of_rounds_and_a_range_around_1_is_no_change():
    """Both arms drift by a factor of 2 from round to round, which a ratio of medians would not see through."""
    rounds = [{"a": measured(0.010, 1.0), "b": measured(0.020, 0.9)},
              {"a": measured(0.020, 2.0), "b": measured(0.038, 2.2)},
              {"a": measured(0.014, 1.5), "b": measured(0.028, 1.5)}]
    rows = step_bench.rows_of(rounds)
    print(*(step_bench.line(row, "a") for row in rows), sep="\n")
    assert [(row["what"], row["size"], row["arm"]) for row in rows] == [
        ("decode", 1, "a"), ("decode", 1, "b"), ("prefill", 512, "a"), ("prefill", 512, "b")]
    assert rows[1]["ratio"] == pytest.approx({"median": 2.0, "least": 1.9, "most": 2.0})
    assert rows[3]["ratio"] == pytest.approx({"median": 1.0, "least": 0.9, "most": 1.1})
    assert "no change" in step_bench.line(rows[3], "a") and "no change" not in step_bench.line(rows[1], "a")
    table = micro_tables.engine_steps([{"model": "twin", "commit": "0123456789", "arms": {"a": {}, "b": {}},
                                        "rounds": rounds, "rows": rows}])
    print(table)
    assert "2.00 (1.90 to 2.00) of a |" in table and "of a: no change" in table and "of 3 rounds" in table


def test_an_arm_that_fails_is_named(tmp_path, capsys):
    status = step_bench.main([str(tmp_path / "nothing"), "--arm", "one=", "--arm", "two=A=1", "--no-progress"])
    said = capsys.readouterr().err
    assert status == 1 and said.startswith("step_bench: arm one: exit status 1: "), said


@pytest.mark.parametrize("words", [["--steps", "3"], ["--rounds", "0"], ["--batch", "0"], ["--arm", "one="]])
def test_a_wrong_command_line_is_refused(words):
    with pytest.raises(SystemExit) as caught:
        step_bench.main(["model", *words])
    assert caught.value.code == 2


@pytest.mark.long
def test_it_measures_the_twin(capsys):
    """One round of few steps: the arms really have the back ends that they ask for."""
    words = [str(ROOT / "tests/twin/checkpoint"), "--batch", "1,2", "--prefill", "64", "--steps", "12", "--rounds", "1",
             "--no-progress"]
    assert step_bench.main(words) == 0
    said = capsys.readouterr().out
    print(said)
    assert "linear native" in said.splitlines()[-9] and "linear torch" in said.splitlines()[-8], json.dumps(said)
