"""The benchmark of structured output: its texts are of their grammars, and its verdicts are what it measured."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from tests.helpers.tokenizer import tokenizer_folder
from vllm.overlay.grammar.vocabulary import make_vocabulary
from worklogs import grammar_bench as bench
from worklogs import ledger

SMALL = 8159


def test_every_text_is_of_its_grammar():
    from llguidance import LLMatcher

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(SMALL))
    vocabulary = make_vocabulary(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    kinds = []
    for kind, name, grammar, text in bench.cases_of(tokenizer):
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        assert matcher.consume_tokens(tokens) and matcher.is_accepting(), (kind, name, matcher.get_error()[:300])
        kinds.append(kind)
    assert kinds.count("json") >= 20 and kinds.count("regex") >= 10 and kinds.count("calls") >= 3


def test_verdicts():
    def row(kind: str, *times: int) -> dict:
        return {"kind": kind, "cold_us": list(times), "warm_us": [1], "compile_us": 5}

    result = {"masks": [row("json", 50, 150), row("json", 99), row("regex", 301), row("calls", 9)],
              "apply_us": {"float32": [200, 250, 400]},
              "requests_us": {"first": [60_000, 70_000, 90_000], "next": [5_000, 30_000, 30_000], "free": [1, 2, 3]}}
    kept = {name: (verdict["median"], verdict["kept"]) for name, verdict in bench.verdicts(result).items()}
    assert kept == {"mask, json, cold": (99, True), "mask, regex, cold": (301, False),
                    "apply, float32, a row": (250, True), "request, first beyond next": (55_000, False)}
    numbers = bench.summaries(result)
    assert numbers["mask, json, cold"] == {"count": 3, "median": 99, "mean": 99.7, "p90": 150, "p99": 150, "max": 150}
    assert numbers["request, first"]["median"] == 70_000 and list(numbers)[-1] == "request, first beyond next"
    del result["requests_us"]
    assert list(bench.verdicts(result)) == list(kept)[:3]


def test_a_record_and_its_table(tmp_path, capsys):
    """The whole program but the server, over a small vocabulary; its limits are those of the large one."""
    folder = tokenizer_folder(SMALL)
    bench.main(["--no-server", "--tokenizer", str(folder), "--vocab-size", "8192", "--samples", "4",
                "--out", str(tmp_path)])
    said = capsys.readouterr().out
    path, = tmp_path.glob("*_grammar-bench.json")
    record = json.loads(path.read_text())
    assert record["vocabulary"] == 8192 and record["library"].startswith("llguidance@") and len(record["cases"]) == 16
    assert str(tmp_path) not in path.read_text() and path.name in said
    assert all(len(row["cold_us"]) == row["tokens"] + 1 == len(row["warm_us"]) for row in record["masks"])
    assert {dtype: len(times) for dtype, times in record["apply_us"].items()} == {
        "float32": 2, "bfloat16": 2, "float16": 2}
    assert ledger.grammar([record]).count("\n") == 2 + len(record["summary"]), ledger.grammar([record])


def test_bad_command_lines(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--samples", "2"])
    assert "three are the least" in capsys.readouterr().err
