"""Words that must not come: which token is out when, and that the engine obeys."""

from __future__ import annotations

import pickle

import pytest
import torch

from tests.helpers.fake_engine import FakeEngine, client, ids, post, tokenizer
from tests.helpers.tiny_models import greedy, make_engine, make_qwen2, prompt, run
from vllm.overlay.engine.bad_words import BadWords, bad_sequences


@pytest.mark.parametrize(("sequences", "generated", "out"), [
    ([[3]], [], {3}), ([[3]], [1, 2], {3}), ([[1, 2]], [], set()), ([[1, 2]], [1], {2}), ([[1, 2]], [1, 1], {2}),
    ([[1, 2]], [1, 3], set()), ([[1, 2, 3]], [2], set()), ([[1, 2, 3]], [9, 1, 2], {3}), ([[1, 2], [5]], [1], {2, 5}),
])
def test_which_tokens_are_out(sequences, generated, out):
    processor = pickle.loads(pickle.dumps(BadWords(sequences)))
    logits = processor(generated, torch.zeros(10))
    assert {token for token in range(10) if logits[token] != 0} == out
    assert torch.isfinite(logits).all()


def test_a_word_is_meant_with_and_without_a_blank_before_it():
    found = bad_sequences(["bad word", " x"], tokenizer())
    assert [tokenizer().decode(sequence) for sequence in found].count("bad word") == 1
    assert {tokenizer().decode(sequence) for sequence in found} == {"bad word", " bad word", " x"}


def test_the_request_carries_them_to_the_engine():
    for path in ("/v1/chat/completions", "/v1/completions"):
        engine = FakeEngine("x")
        post(client(engine), path, bad_words=["no"])
        (processor,) = engine.requests[0][1].logits_processors
        beginning, last = ids("no")[:-1], ids("no")[-1]
        assert processor(beginning, torch.zeros(512))[last] < -1000
        engine = FakeEngine("x")
        post(client(engine), path)
        assert not engine.requests[0][1].logits_processors


def test_the_engine_obeys(tmp_path_factory):
    engine = make_engine(make_qwen2(tmp_path_factory.mktemp("qwen2")))
    free = run(engine, [prompt(20, seed=1)], greedy(12))[0].outputs[0].token_ids
    sequences = [list(free[2:4]), [free[6]]]
    for n in (1, 2):
        params = greedy(12, n=n)
        params.logits_processors = [BadWords(sequences)]
        for answer in run(engine, [prompt(20, seed=1)], params, tag=f"n{n}")[0].outputs:
            tokens = list(answer.token_ids)
            assert tokens[:2] == list(free[:2]) and free[6] not in tokens, (free, tokens)
            assert not any(tokens[i:i + 2] == sequences[0] for i in range(11)), (free, tokens)
