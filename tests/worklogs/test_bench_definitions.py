"""The platform's figures, on numbers that can be checked by hand; and the reader of streams, whose clock is told."""
import json
import math

import pytest

from worklogs.bench import client, definitions
from worklogs.stub_server import delta, usage


def sample(index=0, **fields):
    return {"index": index, "conversation": "c", "turn": index, "class": "ok", "status": 200, "error": None,
            "finish": "stop", "intended_s": None, "sent_s": 0.0, "first_s": 1.0, "last_s": 3.0, "prompt_tokens": 1000,
            "cached_tokens": 600, "completion_tokens": 21, "reasoning_tokens": None, "expected_prompt_tokens": 1000,
            "theoretical_reuse": 700, "deltas": 21, "after_finish": 0, **fields}


def test_percentiles_are_linear_between_ranks():
    values = [4.0, 1.0, 3.0, 2.0]
    assert definitions.percentile(values, 0.5) == 2.5
    assert definitions.percentile(values, 0.9) == pytest.approx(3.7)
    assert definitions.percentile(values, 0.1) == pytest.approx(1.3)
    assert definitions.percentile([7.0], 0.99) == 7.0 and definitions.percentile([], 0.5) is None
    assert definitions.percentile([1.0, 2.0, math.inf], 0.5) == 2.0
    assert definitions.percentile([1.0, 2.0, math.inf], 0.51) == math.inf
    assert definitions.percentile([1.0, math.inf, math.inf], 0.9) == math.inf


def test_figures_of_a_request():
    one = sample()
    assert (definitions.ttft(one), definitions.whole(one)) == (1.0, 3.0)
    assert definitions.output_tps(one) == 7.0 and definitions.decode_tps(one) == 10.0
    assert definitions.input_tps(one) == 1000.0
    assert definitions.decode_tps(sample(completion_tokens=1)) is None
    assert definitions.decode_tps(sample(first_s=3.0)) is None
    assert definitions.ttft(sample(first_s=None)) is None


def test_figures_of_a_run():
    failed = sample(2, **{"class": "server_error", "first_s": None, "last_s": None, "prompt_tokens": None,
                          "cached_tokens": None, "completion_tokens": None, "finish": None, "status": 500})
    cold = sample(1, sent_s=3.0, first_s=5.0, last_s=7.0, cached_tokens=0)
    found = definitions.summary([sample(), cold, failed], 10.0)
    assert found["success_rate"] == pytest.approx(2 / 3)
    assert found["hit_rate"] == 0.3 and found["hit_rate_theoretical"] == 0.7
    assert found["aggregate"] == {"output_tps": 4.2, "uncached_input_tps": 140.0, "cached_tps": 60.0,
                                  "total_tps": 204.2}
    assert found["weighted"] == pytest.approx(16.79616 * 4.2 + 2.79936 * 140 + 0.559872 * 60)
    assert found["ttft_s"]["p50"] == 1.5
    # Three were sent: with the failure, the middle one is the slower success, and the 90th percentile is beyond it.
    assert found["failure_adjusted"]["ttft_s"] == {"p10": pytest.approx(1.2), "p50": 2.0, "p90": "infinite",
                                                   "p99": "infinite"}
    assert found["failure_adjusted"]["output_tps"]["p50"] == 5.25
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_weighted_score_is_the_published_one():
    """Of the platform's three coefficients, and of its bound: a raw score of 308,642 is a weighted one of 8,000."""
    assert definitions.weighted(1.0, 0.0, 0.0) == pytest.approx(16.796, rel=1e-4)
    assert definitions.weighted(0.0, 1.0, 0.0) == pytest.approx(2.799, rel=1e-3)
    assert definitions.weighted(0.0, 0.0, 1.0) == pytest.approx(0.56, rel=1e-3)
    score = 308_642 * definitions.WEIGHT
    assert score == pytest.approx(8000, rel=1e-6)
    assert definitions.weighted(1.0, None, 1.0) is None


def test_gates_say_met_not_met_and_not_reported():
    gates = {gate["name"]: gate for gate in definitions.summary([sample(), sample(1, cached_tokens=None)], 10)["gates"]}
    assert gates["TTFT P90, s"] == {"name": "TTFT P90, s", "value": 1.0, "wanted": "at most 5", "met": True}
    assert gates["output TPS per request, P10"]["met"] is False
    # One request reports a cached count, so the other's missing one is 0, as the platform counts.
    assert gates["cache hit rate"]["value"] == 0.3 and gates["cache hit rate"]["met"] is False
    none = {gate["name"]: gate["met"] for gate in definitions.summary([sample(cached_tokens=None)], 10)["gates"]}
    assert none["cache hit rate"] is None and none["weighted score"] is None
    assert [gate["met"] for gate in definitions.summary([], 0.0)["gates"]] == [None] * len(definitions.GATES)


@pytest.mark.parametrize(("name", "lost"), [
    ("prompt_tokens", {"hit_rate", "uncached_input_tps", "total_tps", "weighted"}),
    ("completion_tokens", {"output_tps", "total_tps", "weighted"})])
def test_a_count_that_some_successes_lack_is_no_total(name, lost):
    """A sum over the others would look like the run's: not reported, and neither is what needs it."""
    found = definitions.summary([sample(), sample(1, **{name: None})], 10)
    figures = {**found["aggregate"], "hit_rate": found["hit_rate"], "weighted": found["weighted"]}
    print(figures)
    assert {figure for figure, value in figures.items() if value is None} == lost
    assert found["not_reported"][name] == 1
    failed = sample(2, **{"class": "timeout", name: None})
    whole = definitions.summary([sample(), failed], 10)
    assert whole["weighted"] is not None, "a failure need not report what it used"


def test_groups_by_length_and_turn():
    found = definitions.groups([sample(), sample(1, prompt_tokens=2048), sample(2, prompt_tokens=131072),
                                sample(3, prompt_tokens=None, expected_prompt_tokens=None)])
    assert [(row["group"], row["requests"]) for row in found["by_length"]] == [
        ("0K to 2K", 1), ("2K to 4K", 1), ("128K and more", 1), ("not known", 1)]
    assert [row["group"] for row in found["by_turn"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(("status", "words", "name"), [
    (400, "This model's maximum context length is 8192", "ctx_overflow"), (400, "cannot load image", "image_load"),
    (400, "tools[0].function.parameters is bad", "tool_schema"), (422, "Validation error", "request_validation"),
    (400, "System message must be at the beginning", "multi_system_template"), (401, "key", "auth"),
    (429, "slow down", "rate_limited"), (404, "model", "not_found"), (500, "it broke", "server_error"),
    (418, "", "http_418"), (400, "", "http_400"),
    # Words come before the status, whichever it is.
    (500, "maximum context length", "ctx_overflow"), (401, "Field required: key", "request_validation"),
    (404, "image not found", "image_load"), (429, "this model's maximum context length", "ctx_overflow"),
    (429, "too many tokens a minute", "rate_limited"),
    (400, "tool 3 does not suit the chat template", "tool_schema")])
def test_error_classes(status, words, name):
    assert definitions.classify(status, words) == name


HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(text):
    return f"{len(text.encode()):x}\r\n{text}\r\n"


def read(*pieces):
    """A reading of (stamp, bytes or text)."""
    reading = client.Reading()
    for stamp, piece in pieces:
        reading.feed(piece if isinstance(piece, bytes) else piece.encode(), stamp)
    return reading


def test_the_first_token_is_stamped_when_its_event_is_complete():
    event = chunk(delta(content="a"))
    found = read((1.0, HEAD + chunk(delta(role="assistant", content=""))), (2.0, event[:30]), (3.0, event[30:]),
                 (4.0, chunk(delta(content="b"))), (5.0, chunk(delta("stop") + usage(9, 2, 4)) + "0\r\n\r\n"))
    assert (found.first, found.last, found.deltas, found.complete) == (3.0, 5.0, 2, True)
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens, found.finish) == (9, 2, 4, "stop")


@pytest.mark.parametrize("fields", [{"reasoning_content": "x"}, {"reasoning": "x"}, {"content": "x"},
                                    {"tool_calls": [{"index": 0}]}])
def test_every_kind_of_output_is_a_first_token(fields):
    assert read((1.0, HEAD), (2.0, chunk(delta(**fields)))).first == 2.0


@pytest.mark.parametrize("fields", [{"content": ""}, {"role": "assistant"}, {"content": None}, {"tool_calls": []}])
def test_nothing_is_no_first_token(fields):
    assert read((1.0, HEAD), (2.0, chunk(delta(**fields)))).first is None


def test_a_stream_cut_anywhere_is_read_the_same():
    events = delta(reasoning_content="日本") + delta(content="🎉")
    data = (HEAD + chunk(events) + chunk("data: [DONE]\n\n") + "0\r\n\r\n").encode()
    whole = read((1.0, data))
    for size in (1, 2, 7):
        pieces = read(*((1.0, data[place:place + size]) for place in range(0, len(data), size)))
        assert (pieces.deltas, pieces.complete, pieces.first) == (whole.deltas, True, 1.0) == (2, True, 1.0)


def test_a_body_without_a_length_ends_with_the_connection():
    found = read((1.0, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + delta(content="a")))
    assert not found.complete
    found.ended()
    assert found.complete
    cut = read((1.0, HEAD + chunk(delta(content="a"))))
    cut.ended()
    assert not cut.complete, "a chunked stream without its end was aborted"


def test_the_last_cached_count_that_is_not_zero_counts():
    assert read((1.0, HEAD + chunk(usage(9, 1, 5) + usage(9, 2, 0)))).cached_tokens == 5
    assert read((1.0, HEAD + chunk(usage(9, 1, 0)))).cached_tokens == 0
    assert read((1.0, HEAD + chunk(usage(9, 1, None)))).cached_tokens is None
    timings = 'data: {"choices": [], "timings": {"cache_n": 7}}\n\n'
    assert read((1.0, HEAD + chunk(usage(9, 1, None) + timings))).cached_tokens == 7
