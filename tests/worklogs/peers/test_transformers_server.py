"""The server around `generate`, with a stand-in for the model: what it streams, counts and refuses."""
import asyncio
import contextlib
import http.server
import threading
import types

import pytest
import torch

from worklogs.bench.client import Client
from worklogs.peers import transformers_server as server

WORDS = {1: "one ", 2: "two ", 3: "\ufffd", 4: "four", 9: ""}


class Tokenizer:
    """One word per id; 3 and 4 make one character together."""

    def decode(self, ids, skip_special_tokens):
        return "ü" if ids == [3, 4] else "".join(WORDS[each] for each in ids)


class Stand(server.Model):
    """Says ids of a list."""

    def __init__(self, ids):
        self.ids, self.tokenizer = ids, Tokenizer()
        self.lock, self.rendering = threading.Lock(), threading.Lock()
        self.served = types.SimpleNamespace(render=self._render)
        self.model = types.SimpleNamespace(generate=self._generate,
                                           generation_config=types.SimpleNamespace(eos_token_id=[9, 10]))
        self.asked = []

    def _render(self, body):
        if body["messages"][0]["content"] == "bad":
            raise server.ServedError("a bad message")
        return types.SimpleNamespace(ids=[5, 6, 7])

    def _generate(self, input_ids, attention_mask, streamer, **settings):
        self.asked.append(settings)
        streamer.put(input_ids)
        for each in self.ids[:settings["max_new_tokens"]]:
            if each is None:
                raise RuntimeError("out of memory")
            streamer.put(torch.tensor([each]))
        streamer.end()
        return torch.tensor([[5, 6, 7, *self.ids[:settings["max_new_tokens"]]]])


@contextlib.contextmanager
def serving(stand):
    """A client of its server."""
    handler = type("Handler", (server.Handler,), {"model": stand})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        try:
            yield Client(f"http://127.0.0.1:{httpd.server_address[1]}", 20.0)
        finally:
            httpd.shutdown()


def ask(stand, content="hello", path="/v1/chat/completions", **fields):
    """A sample's fields of one streamed request."""
    body = {"prompt": content} if path == "/v1/completions" else {"messages": [{"role": "user", "content": content}]}
    with serving(stand) as client:
        return asyncio.run(client.stream({"stream": True, "stream_options": {"include_usage": True}, **body, **fields},
                                         path=path))


@pytest.mark.parametrize(("ids", "fields", "finish", "count", "deltas"), [
    ([1, 2, 9], {}, "stop", 3, 2),                  # The end is counted and has no text.
    ([1, 2, 1, 2], {"max_tokens": 2}, "length", 2, 2),
    ([1, 3, 4, 9], {}, "stop", 4, 2),               # Half a character waits for the other half.
    ([1, 9], {"ignore_eos": True, "max_tokens": 2}, "length", 2, 1)])
def test_an_answer(ids, fields, finish, count, deltas):
    found = ask(Stand(ids), **fields)
    print(found)
    assert (found["class"], found["error"], found["finish"]) == ("ok", None, finish)
    assert (found["prompt_tokens"], found["completion_tokens"], found["deltas"]) == (3, count, deltas)
    assert found["cached_tokens"] is None and found["reasoning_tokens"] is None


def test_completions_take_token_ids():
    found = ask(Stand([1, 2, 9]), [5, 6, 7], "/v1/completions")
    assert (found["class"], found["finish"], found["prompt_tokens"], found["completion_tokens"], found["deltas"]) == (
        "ok", "stop", 3, 3, 2), found
    with serving(Stand([1, 3, 4])) as client:
        status, whole = asyncio.run(client.ask("POST", "/v1/completions", {"prompt": [5, 6], "max_tokens": 3}))
        assert status == 200 and whole["choices"] == [{"index": 0, "text": "one \u00fc", "finish_reason": "length"}]
        assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
        for prompt in ("words", [], ["5"]):
            status, said = asyncio.run(client.ask("POST", "/v1/completions", {"prompt": prompt}))
            assert status == 400 and "token ids" in said["error"]["message"]
    with serving(Stand([1, None])) as client:
        status, said = asyncio.run(client.ask("POST", "/v1/completions", {"prompt": [5]}))
        assert status == 500 and "out of memory" in said["error"]["message"]


def test_what_generate_is_told():
    settings = Stand([]).settings
    assert settings({}) == {"max_new_tokens": server.NO_END}
    assert settings({"max_tokens": 5, "min_tokens": 5, "ignore_eos": True, "temperature": 0}) == {
        "max_new_tokens": 5, "min_new_tokens": 5, "eos_token_id": None, "do_sample": False, "temperature": None,
        "top_p": None, "top_k": None}
    assert settings({"max_completion_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9}) == {
        "max_new_tokens": 7, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9}


def test_failures():
    found = ask(Stand([1, None]))
    assert found["class"] == "ok" and found["error"] == "RuntimeError: out of memory" and found["finish"] is None
    for content, words, fields in (("bad", "a bad message", {}), ("hello", "stream must be true", {"stream": False}),
                                   ([{"type": "image_url", "image_url": {}}], "text only", {})):
        found = ask(Stand([1]), content, **fields)
        assert found["status"] == 400 and words in found["error"], found
