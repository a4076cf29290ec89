"""Faults in every part of the server, each by breaking it while it works: the request is told, by its id, in the form
of its API; the next one is served as if nothing had been; nothing is left."""

from __future__ import annotations

import json
import re
import threading

import pytest

from tests.helpers.fake_engine import FakeEngine, client
from tests.helpers.live_server import PLACES
from tests.helpers.picture_files import part, picture, shown
from vllm.overlay.grammar import step as grammar_step
from vllm.overlay.grammar.waiting import Grammars
from vllm.overlay.serving.detokenise import ByteDetokeniser
from vllm.overlay.serving.parse.output import OutputParser
from vllm.overlay.serving.pictures import reader
from vllm.overlay.serving.render import Renderer

CHAT, COMPLETIONS, RESPONSES, MESSAGES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
GRAMMAR = {"guided_regex": "[ab]{20}", "max_tokens": 60, "thinking": False}


class Broken(RuntimeError):
    """The fault."""


class Fault:
    """Raises from its call number `after` on, until it is mended; calls before a step was computed do not count."""

    def __init__(self, after: int = 0, live=None) -> None:
        self.calls, self.after, self.mended = 0, after, False
        self._live, self._begun = live, len(live.steps) if live else 0

    def around(self, works):
        def broken(*args, **kwargs):
            if self._live is not None and len(self._live.steps) == self._begun:
                return works(*args, **kwargs)
            self.calls += 1
            if self.calls > self.after and not self.mended:
                raise Broken("no luck")
            return works(*args, **kwargs)

        return broken


def model(live):
    return live.engine.model_executor.driver_worker.model_runner.model


# Of the engine: what is broken, and the request that comes there. "alone": only that request fails.
ENGINE = {
    "model": (lambda live: (model(live), "forward"), {}),
    "logits": (lambda live: (model(live), "compute_logits"), {}),
    "sampler": (lambda live: (model(live), "sample"), {}),
    "grammar": (lambda live: (grammar_step, "_compute"), GRAMMAR),
    "outputs": (lambda live: (live.engine.output_processor, "process_outputs"), {}),
}
# Before the engine.
FRONT = {
    "parser": (lambda live: (OutputParser, "feed"), {}),
    "detokeniser": (lambda live: (ByteDetokeniser, "push"), {}),
}


def events(response):
    """The stream's events as (name, data); the name None where there is none."""
    found = []
    for block in response.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if "data" in fields:
            data = fields["data"]
            found.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


def check_told(response, path, stream, prefix, why):
    """The whole of what a client sees of a fault."""
    message = re.compile(rf"The server failed on request {prefix}[0-9a-f]{{32}}: {why}\.")
    if not stream:
        assert response.status_code == 500, response.text
        body = response.json()
        if path == MESSAGES:
            assert body["type"] == "error" and body["error"]["type"] == "api_error", body
            assert body["request_id"] in body["error"]["message"]
        else:
            assert set(body) == {"error"}
            assert (body["error"]["type"], body["error"]["code"], body["error"]["param"]) == (
                "server_error", "internal_error", None), body
        assert message.fullmatch(body["error"]["message"]), body
        return
    assert response.status_code == 200, response.text
    *before, (name, last) = events(response)
    if path == MESSAGES:
        assert name == "error" and last["error"]["type"] == "api_error" and message.fullmatch(last["error"]["message"])
    elif path == RESPONSES:
        assert name == last["type"] == "response.failed" and last["response"]["status"] == "failed", last
        assert last["response"]["error"]["code"] == "internal_error"
        assert message.fullmatch(last["response"]["error"]["message"]), last
    else:
        assert last == "[DONE]"
        *before, (_, told) = before
        assert set(told) == {"error"} and told["error"]["code"] == "internal_error", told
        assert told["error"]["type"] == "server_error" and message.fullmatch(told["error"]["message"]), told
        ids = {data["id"] for _, data in before}
        assert all(one in told["error"]["message"] for one in ids), "another id than that of the chunks"


def answer(live):
    body = live.post(max_tokens=12).json()
    return body["choices"][0]["message"], body["usage"]["completion_tokens"]


PREFIX = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", RESPONSES: "resp_", MESSAGES: "msg_"}
LIMIT = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("where", [*ENGINE, *FRONT])
def test_where(live, where, after, stream, monkeypatch):
    """after: how often it works before, so that a stream has begun."""
    place, body = {**ENGINE, **FRONT}[where]
    plain = answer(live)
    fault = Fault(after, live)
    target, name = place(live)
    monkeypatch.setattr(target, name, fault.around(getattr(target, name)), raising=True)
    why = "the step that computed this request failed: Broken: no luck" if where in ENGINE else "Broken"
    check_told(live.post(stream=stream, **body), CHAT, stream, "chatcmpl-", why)
    assert fault.calls == after + 1, "it was tried again"
    fault.mended = True
    live.until_idle()
    assert answer(live) == plain
    assert live.process._errored_with is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("where", ["model", "detokeniser"])
def test_every_api(live, path, stream, where, monkeypatch):
    body = {"stream": stream, LIMIT[path]: 8}
    if path == RESPONSES:
        body["input"] = "Hello"
    place, _ = {**ENGINE, **FRONT}[where]
    fault = Fault(2, live)
    target, name = place(live)
    monkeypatch.setattr(target, name, fault.around(getattr(target, name)))
    why = "the step that computed this request failed: Broken: no luck" if where in ENGINE else "Broken"
    check_told(live.post(path, **body), path, stream, PREFIX[path], why)
    fault.mended = True
    assert live.post(path, **body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["_chat", "_tokenised"])
def test_the_prompt(live, where, stream, monkeypatch):
    """Before an answer has an id: one is made, for the log and the client; nothing has been sent yet."""
    fault, begun = Fault(), len(live.steps)
    monkeypatch.setattr(Renderer, where, fault.around(getattr(Renderer, where)))
    check_told(live.post(stream=stream), CHAT, False, "req-", "Broken")
    fault.mended = True
    assert len(live.steps) == begun and live.post().status_code == 200


@pytest.mark.parametrize("where", ["_measure", "_make"])
def test_pictures(live, where, monkeypatch):
    http = client(FakeEngine("I see."), pictures=shown())
    monkeypatch.setattr(reader, where, Fault().around(getattr(reader, where)))
    body = {"model": "llm", "messages": [{"role": "user", "content": [part(picture(64, 64))]}]}
    check_told(http.post(CHAT, json=body), CHAT, False, "req-", "Broken")


def test_the_body_of_another_route(live, monkeypatch):
    fault = Fault()
    monkeypatch.setattr(Renderer, "_tokenised", fault.around(Renderer._tokenised))
    check_told(live.post("/tokenize", prompt="x"), CHAT, False, "req-", "Broken")


def test_only_those_of_the_step(live, monkeypatch):
    """Who waits is not in it; and of who is, each is told by its own id."""
    plain, fault = answer(live), Fault(3)
    responses, begun = {}, len(live.steps)

    def ask(name, **body):
        responses[name] = live.post(**body)

    monkeypatch.setattr(model(live), "forward", fault.around(model(live).forward))
    with live.slow(0.1):
        running = [threading.Thread(target=ask, args=(f"runs {i}", ), kwargs={"max_tokens": 500})
                   for i in range(PLACES)]
        for thread in running:
            thread.start()
        live.until(lambda: len(live.steps) > begun and len(live.steps[-1]) == PLACES, "they do not run")
        waits = threading.Thread(target=ask, args=("waits", ), kwargs={"max_tokens": 12})
        waits.start()
        live.until(lambda: live.engine.scheduler[0].waiting or fault.calls > 3, "it does not wait")
        live.until(lambda: fault.calls > 3, "nothing failed")
        fault.mended = True
    for thread in (*running, waits):
        thread.join(60)
    told = [responses[f"runs {i}"] for i in range(PLACES)]
    for response in told:
        check_told(response, CHAT, False, "chatcmpl-", "the step that computed this request failed: Broken: no luck")
    assert told[0].text != told[1].text
    body = responses["waits"].json()
    assert (body["choices"][0]["message"], body["usage"]["completion_tokens"]) == plain


@pytest.mark.parametrize("stream", [False, True])
def test_all_samples_of_a_request(live, stream, monkeypatch):
    """One of five fails, in a place of two: there is one answer, and it is an error."""
    fault = Fault(5)
    monkeypatch.setattr(model(live), "forward", fault.around(model(live).forward))
    check_told(live.post(n=5, stream=stream), CHAT, stream, "chatcmpl-",
               "the step that computed this request failed: Broken: no luck")


@pytest.mark.parametrize("where", ["follow", "hold"])
def test_a_request_that_cannot_be_added(live, where, monkeypatch):
    """By a fault of ours, found before it is in any step: it fails alone, while another one runs."""
    fault = Fault()
    with live.slow(0.05):
        other = live.open(stream=True, max_tokens=1000)
        begun = len(live.steps)
        live.until(lambda: len(live.steps) > begun, "it does not run")
        monkeypatch.setattr(Grammars, where, fault.around(getattr(Grammars, where)))
        response = live.post(**GRAMMAR)
        monkeypatch.undo()
        at = len(live.steps)
        live.until(lambda: len(live.steps) > at + 2, "the other one does not go on")
        other.leave()
    check_told(response, CHAT, False, "chatcmpl-", r"(Broken|.*Broken: no luck)")
    assert live.process._errored_with is None


def test_an_abort_of_who_is_not_there(live):
    for request_id in ("nobody", "nobody#3"):
        live.in_loop(lambda request_id=request_id: live.client.abort(request_id)).close()
    assert live.post().status_code == 200
