"""A client that leaves, at every stage, over the real engine: what it costs is counted in steps; and nothing of it is
left in any table of the engine or of the server."""

from __future__ import annotations

import threading
import time

import pytest

from tests.helpers.live_server import BUDGET, PLACES
from vllm.overlay.serving.render import Renderer

LONG = [{"role": "user", "content": "word " * 400}]
# Seconds of a step: enough for news of a closed socket to arrive before it ends, on a busy machine.
PACE = 0.3


def spent_on(live, asked, stays=()):
    """Closes the request's connection and returns the steps that were begun for it later. stays: ids of others."""
    before = len(live.steps)
    asked.leave()

    def is_gone():
        (scheduler, ) = live.engine.scheduler
        here = {group.request_id for group in (*scheduler.running, *scheduler.waiting)}
        return here <= set(stays) if stays else not live.left()

    live.until(is_gone, "the engine still has it")
    return [step for step in live.steps[before:] if set(step) - set(stays)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", ["prefill", "decoding", "samples"])
def test_leaving(live, path, stream, stage):
    """samples: in the middle of the second wave of n = 5 in 2 places."""
    body = {"prefill": {"messages": LONG, "prompt": "word " * 400}, "decoding": {"max_tokens": 1000},
            "samples": {"n": 5, "max_tokens": 3}}[stage]
    begun = len(live.steps)
    asked = live.open(path, stream=stream, **body)
    # At full speed up to the stage.
    wanted = {"prefill": 2, "decoding": 12, "samples": 5}[stage]
    live.until(lambda: len(live.steps) >= begun + wanted, "it does not compute")
    with live.slow(PACE):
        at = len(live.steps)
        live.until(lambda: len(live.steps) > at, "no slow step")
        steps = spent_on(live, asked)
    assert len(steps) <= 1, f"steps for nobody: {steps}"
    if stage == "prefill":
        assert len(live.steps) - begun < 400 // BUDGET, "the prompt was computed to its end"


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_the_queue(live, stream):
    """It has never been in a step, and never is."""
    with live.slow(PACE):
        begun = len(live.steps)
        others = [live.open("/v1/completions", max_tokens=1000, stream=True) for _ in range(PLACES)]
        live.until(lambda: len(live.steps) > begun and len(live.steps[-1]) == PLACES, "the others do not run")
        names = set(live.steps[-1])
        asked = live.open(stream=stream)
        live.until(lambda: live.engine.scheduler[0].waiting, "it does not wait")
        assert not spent_on(live, asked, stays=names)
        assert names <= set(live.steps[-1]), "the others do not go on"
        for other in others:
            other.leave()


def test_leaving_in_the_middle_of_the_body(live):
    begun = len(live.steps)
    asked = live.open(cut=40)
    time.sleep(0.1)
    asked.leave()
    live.until_idle()
    assert len(live.steps) == begun


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_the_prompt_is_made(live, stream, monkeypatch):
    """What a thread has begun goes on; the engine never hears of it."""
    begun, rendering, go_on = len(live.steps), threading.Event(), threading.Event()
    chat = Renderer._chat

    def slowly(*args):
        rendering.set()
        go_on.wait(10)
        return chat(*args)

    monkeypatch.setattr(Renderer, "_chat", slowly)
    asked = live.open(stream=stream)
    assert rendering.wait(10)
    asked.leave()
    live.until_idle()
    go_on.set()
    monkeypatch.undo()
    assert live.post().status_code == 200
    assert all(len(step) == 1 for step in live.steps[begun:]) and len({step[0] for step in live.steps[begun:]}) == 1


def test_leaving_without_having_read(live):
    """The server is in the middle of a write that does not end."""
    asked = live.open(stream=True, max_tokens=1900, logprobs=True, top_logprobs=20)
    writing = lambda: any(not transport.is_reading() or transport.get_write_buffer_size() > 60_000  # noqa: E731
                          for transport in live.in_loop(lambda: [connection.transport for connection in
                                                                 live.http.server_state.connections]))
    live.until(writing, "everything was taken")
    held = live.in_loop(lambda: [connection.transport.get_write_buffer_size()
                                 for connection in live.http.server_state.connections])
    with live.slow(PACE):
        at = len(live.steps)
        live.until(lambda: len(live.steps) > at, "no slow step")
        assert len(spent_on(live, asked)) <= 1
    assert sum(held) < 1 << 20, f"bytes in the server's buffer: {held}"
