"""What the engine refuses before it starts: nothing is left of the request."""
import pytest

from tests.helpers.tiny_models import VOCABULARY, add, greedy, make_engine, prompt, run


@pytest.fixture(scope="module")
def engine(qwen2):
    engine = make_engine(qwen2)
    # All that is asked of a tokenizer here is how many tokens it has.
    engine.get_tokenizer = lambda lora_request=None: range(VOCABULARY)
    return engine


@pytest.mark.parametrize("n", [1, 3])
def test_every_allowed_token_forbidden_by_min_tokens(engine, n):
    """No token could be sampled: stock gives token 0, which was not allowed, with a logprob that is no number."""
    fields = {"min_tokens": 2, "stop_token_ids": [5, 6], "detokenize": False}
    params = greedy(4, allowed_token_ids=[5, 6], **fields)
    params.n = n
    with pytest.raises(ValueError, match="min_tokens"):
        add(engine, "refused", prompt(10, seed=1), params)
    assert not engine.has_unfinished_requests()
    output, = run(engine, [prompt(10, seed=1)], greedy(4, allowed_token_ids=[5, 7], **fields))
    assert list(output.outputs[0].token_ids)[:2] == [7, 7]
