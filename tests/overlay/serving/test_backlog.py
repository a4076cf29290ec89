"""Outputs that are not read at once are joined; the sum is what was sent; too much ends the request."""

from __future__ import annotations

import asyncio
import random

import pytest

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.overlay.serving.backlog import Backlog
from vllm.overlay.serving.errors import RequestError


def output(index, tokens, logprobs=None, finish=None, stop=None, cached=None, prompt_logprobs=None):
    one = CompletionOutput(index, "", tokens, None, logprobs, finish, stop)
    made = RequestOutput("r", None, [1], prompt_logprobs, [one], finish is not None)
    made.num_cached_tokens = cached
    return made


async def test_one_by_one_where_the_reader_keeps_up():
    backlog = Backlog()
    for tokens in ([1], [2, 3]):
        backlog.put(0, output(0, tokens))
        position, found = await backlog.get()
        assert position == 0 and found.outputs[0].token_ids == tokens
    backlog.end()
    assert await backlog.get() is None and await backlog.get() is None


async def test_joined_where_it_does_not():
    backlog = Backlog()
    backlog.put(0, output(1, (7, ), [{7: 0.5}], cached=4, prompt_logprobs=[None, {3: 1.0}]))
    backlog.put(1, output(0, [9]))
    backlog.put(0, output(1, [8], [{8: 0.25, 9: 0.1}], cached=4))
    backlog.put(0, output(0, [5]))
    backlog.put(0, output(1, [6], [{6: 1.0}], finish="stop", stop=6, cached=4))
    backlog.end()
    position, found = await backlog.get()
    assert position == 0 and found.prompt_logprobs == [None, {3: 1.0}] and found.num_cached_tokens == 4
    second, first = found.outputs
    assert (second.index, second.token_ids, second.finish_reason, second.stop_reason) == (1, [7, 8, 6], "stop", 6)
    assert second.logprobs == [{7: 0.5}, {8: 0.25, 9: 0.1}, {6: 1.0}]
    assert (first.index, first.token_ids, first.logprobs, first.finish_reason) == (0, [5], None, None)
    position, found = await backlog.get()
    assert position == 1 and found.outputs[0].token_ids == [9]
    assert await backlog.get() is None


async def test_any_reader_reads_the_same():
    chance = random.Random(5)
    for _ in range(50):
        backlog, sent, read = Backlog(), {}, {}

        async def reader(backlog=backlog, read=read):
            while (found := await backlog.get()) is not None:
                for one in found[1].outputs:
                    read.setdefault((found[0], one.index), []).extend(one.token_ids)
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)

        task = asyncio.ensure_future(reader())
        for _ in range(60):
            key = chance.randrange(2), chance.randrange(3)
            tokens = [chance.randrange(100) for _ in range(chance.randrange(1, 4))]
            sent.setdefault(key, []).extend(tokens)
            backlog.put(key[0], output(key[1], tokens))
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
        backlog.end()
        await asyncio.wait_for(task, 5)
        assert read == sent


async def test_an_error_comes_after_what_came_before_it():
    backlog = Backlog()
    backlog.put(0, output(0, [1]))
    backlog.end(KeyError("first"))
    backlog.end(KeyError("second"))
    assert (await backlog.get())[1].outputs[0].token_ids == [1]
    for _ in range(2):
        with pytest.raises(KeyError, match="first"):
            await backlog.get()


@pytest.mark.parametrize(("alternatives", "fits"), [(0, 100), (4, 20)])
async def test_too_much(alternatives, fits):
    """Alternatives count as tokens do; what has been read counts no more."""
    backlog = Backlog(most=100)

    def one():
        return output(0, [1], [dict.fromkeys(range(alternatives), 0.0)] if alternatives else None)

    for _ in range(2):
        for _ in range(fits):
            backlog.put(0, one())
        assert len((await backlog.get())[1].outputs[0].token_ids) == fits
    with pytest.raises(RequestError, match="more than 100 tokens") as caught:
        for i in range(fits + 1):
            backlog.put(i % 2, one())
    assert i == fits and caught.value.code == "client_too_slow"
