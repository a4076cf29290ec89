"""What a streaming client is sent: every token once, nothing while its prompt is being computed."""
import pytest

from tests.helpers.tiny_models import add, greedy, make_engine, prompt
from vllm.sampling_params import RequestOutputKind

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module", params=[False, True], ids=["new objects", "reused objects"])
def engine(qwen2, request):
    """The engine process reuses the output objects of a request; both ways must say the same."""
    engine = make_engine(qwen2, max_num_batched_tokens=128, enable_prefix_caching=True)
    engine.use_cached_outputs = request.param
    return engine


def sent(engine, kind, tokens=620, length=5, seed=1):
    """Per output: (new token ids, finished, cached tokens, whether the prompt came along)."""
    add(engine, "r", prompt(tokens, seed), greedy(length, output_kind=kind))
    outputs = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            (completion, ) = output.outputs
            outputs.append((list(completion.token_ids), output.finished, output.num_cached_tokens,
                            output.prompt_token_ids is not None))
    return outputs


def test_deltas(engine):
    outputs = sent(engine, DELTA)
    assert [len(tokens) for tokens, *_ in outputs] == [1] * 5, f"{outputs}"
    assert [finished for _, finished, *_ in outputs] == [False] * 4 + [True]
    assert [with_prompt for *_, with_prompt in outputs] == [True] + [False] * 4


def test_whole_outputs(engine):
    deltas = sent(engine, DELTA)
    whole = sent(engine, CUMULATIVE)
    answer = [token for tokens, *_ in deltas for token in tokens]
    assert [tokens for tokens, *_ in whole] == [answer[:length] for length in range(1, 6)]
    assert [tokens for tokens, *_ in sent(engine, FINAL_ONLY)] == [answer]


def test_cached_tokens_are_those_not_computed_again(engine):
    first = sent(engine, DELTA, seed=2 + engine.use_cached_outputs)
    second = sent(engine, DELTA, seed=2 + engine.use_cached_outputs)
    assert {cached for *_, cached, _ in first} == {0}
    assert {cached for *_, cached, _ in second} == {619 // 16 * 16}
    assert [tokens for tokens, *_ in first] == [tokens for tokens, *_ in second]


def test_stock_returns_prompt_and_output_as_new_tokens():
    from vllm.sequence import Sequence
    from vllm.sequence_stock import Sequence as Stock
    for kind, expected in ((Sequence, []), (Stock, list(range(620)))):
        seq = kind(1, {"prompt_token_ids": list(range(620))}, 16)
        assert list(seq.get_output_token_ids_to_return(delta=True)) == expected
        assert list(seq.get_output_token_ids_to_return(delta=False)) == []


def test_an_ignored_prompt_is_reported(engine):
    add(engine, "long", prompt(1025, 1), greedy(1, output_kind=DELTA))
    (output, ) = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "length" and not output.outputs[0].token_ids
