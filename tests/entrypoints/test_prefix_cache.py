"""What the API says about the prefix cache, and what it tells the engine, over an engine that a test plays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.helpers.fake_engine import FakeEngine, client, ids, post, stream, tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]


class Caching(FakeEngine):
    """Reports the cached tokens it is told, one number for each request; an output later, one more count of the same
    request is reported, as it happens with several samples."""

    def __init__(self, *reported: Sequence[int], **options) -> None:
        super().__init__(**options)
        self.reported = [list(counts) for counts in reported]

    async def generate(self, *args, **kwargs):
        counts = self.reported.pop(0)
        async for output in super().generate(*args, **kwargs):
            output.num_cached_tokens = counts.pop(0) if len(counts) > 1 else counts[0]
            yield output


def cached(body: dict) -> int:
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("count", [0, 7])
def test_cached_tokens(path, count):
    """In whole and streamed answers, a miss among them; in every chunk that has usage."""
    assert cached(post(client(Caching([count])), path)) == count
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(client(Caching([count])), path, stream_options=options)
    assert len(chunks) > 2 and [cached(chunk) for chunk in chunks] == [count] * len(chunks)


def test_an_engine_that_says_nothing_has_cached_nothing():
    assert cached(post(client(FakeEngine()))) == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_samples_share_their_prompt(path):
    """Its tokens count once, and so do those that were cached: what the engine said last."""
    body = post(client(Caching([40, 3])), path, n=3)
    assert cached(body) == 3 < body["usage"]["prompt_tokens"] + 40


def test_prompts_add_up():
    body = post(client(Caching([5], [0], [7])), "/v1/completions", prompt=["one", "two", "three"])
    assert cached(body) == 12
    assert body["usage"]["prompt_tokens"] == sum(len(ids(text)) for text in ("one", "two", "three"))


@pytest.mark.parametrize("wanted", [True, False])
def test_boundaries_go_to_an_engine_that_has_use_for_them(wanted):
    engine = FakeEngine()
    http = client(engine, boundaries=wanted)
    post(http, messages=MESSAGES)
    post(http, "/v1/completions")
    tokens = engine.requests[0][0]
    sent, completion = engine.beside
    assert completion is None
    if not wanted:
        assert sent is None
        return
    assert set(sent) == {"boundaries"}
    pieces = [tokenizer().decode(tokens[first:last])
              for first, last in zip((0, *sent["boundaries"]), (*sent["boundaries"], None), strict=True)]
    assert pieces == ["<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\none<|im_end|>\n",
                      "<|im_start|>assistant\ntwo<|im_end|>\n", "<|im_start|>user\nthree<|im_end|>\n",
                      "<|im_start|>assistant\n<think>\n"]
