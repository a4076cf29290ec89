"""logit_bias and allowed_token_ids reach the added tokens, which stock takes for unknown."""
import pytest
import torch
from transformers import AutoTokenizer

from tests.helpers.tokenizer import added_token_ids, tokenizer_folder
from vllm.entrypoints.openai import logits_processors, logits_processors_stock

SMALL = 479


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tokenizer_folder(small=SMALL))


def test_added_tokens_can_be_forbidden_and_allowed(tokenizer):
    end = added_token_ids(small=SMALL)["</think>"]
    logits = torch.zeros(len(tokenizer))
    for processor in logits_processors.get_logits_processors({str(end): -100.0}, [end, 5], tokenizer):
        logits = processor([], logits)
    assert logits[end] == -100 and logits[5] == 0 and torch.isinf(logits).sum() == len(tokenizer) - 2, logits
    with pytest.raises(ValueError, match="out-of-vocab"):
        logits_processors_stock.get_logits_processors({end: -100.0}, None, tokenizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_are_added_as_stock_adds_them(tokenizer, dtype):
    """Clamped to 100, several at once, also where they come as text; a second row is not biased by the first."""
    biases = {"3": 1.5, "7": -100.0, "8": 250.0, "20": 0.0}
    rows = torch.randn(2, len(tokenizer), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = rows.clone()
    (ours,) = logits_processors.get_logits_processors(biases, None, tokenizer)
    (stock,) = logits_processors_stock.get_logits_processors(biases, None, logits_processors._WholeVocabulary(
        len(tokenizer)))
    for row in (0, 1):
        assert torch.equal(ours([], rows[row]), stock([], expected[row]))
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("bias, allowed", [({-1: 1.0}, None), ({10**6: 1.0}, None), (None, [10**6]), (None, [])])
def test_what_is_no_token_is_refused(tokenizer, bias, allowed):
    with pytest.raises(ValueError, match="vocab|Empty"):
        logits_processors.get_logits_processors(bias, allowed, tokenizer)
