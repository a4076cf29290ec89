"""The benchmark of structured output: its texts are of their grammars, and its verdicts are what it measured."""

from __future__ import annotations

from transformers import AutoTokenizer

from tests.helpers.tokenizer import added_token_ids, tokenizer_folder
from vllm.overlay.grammar.vocabulary import make_vocabulary
from worklogs import grammar_bench as bench

SMALL = 8159


def test_every_text_is_of_its_grammar():
    """With control tokens where the published vocabulary has them."""
    from llguidance import LLMatcher

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(SMALL))
    control = added_token_ids(SMALL)
    vocabulary = make_vocabulary(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    kinds = []
    for kind, name, grammar, text in bench.cases():
        for published, token in ((248058, "<tool_call>"), (248059, "</tool_call>")):
            grammar = grammar.replace(f"<[{published}]>", f"<[{control[token]}]>")
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        assert matcher.consume_tokens(tokens) and matcher.is_accepting(), (kind, name, matcher.get_error()[:300])
        kinds.append(kind)
    assert kinds.count("json") >= 20 and kinds.count("regex") >= 10 and kinds.count("calls") >= 3


def test_verdicts():
    def row(kind: str, *times: int) -> dict:
        return {"kind": kind, "cold_us": list(times), "warm_us": [1], "compile_us": 5}

    result = {"masks": [row("json", 50, 150), row("json", 99), row("regex", 301), row("calls", 9)],
              "apply_us": {"float32": [200, 250, 400]}, "server": {"first_us": [60_000, 70_000, 90_000],
                                                                   "next_us": [5_000, 30_000, 30_000]}}
    kept = {name: (verdict["measured"], verdict["kept"]) for name, verdict in bench.verdicts(result).items()}
    assert kept == {"mask median, json, us": (99, True), "mask median, regex, us": (301, False),
                    "apply median, float32, us a row": (250, True),
                    "first request beyond the next, median, ms": (55, False)}
    numbers = bench.summaries(result)
    assert numbers["mask json cold_us"] == {"count": 3, "median": 99, "mean": 99.7, "p90": 150, "p99": 150, "max": 150}
    assert numbers["server first_us"]["median"] == 70_000 and set(numbers["apply float32_us"]) == set(
        numbers["compile calls_us"])


def test_applying_is_measured():
    found = bench.measure_apply(5)
    assert set(found) == {"float32", "bfloat16", "float16"} and all(len(times) == 3 for times in found.values())
