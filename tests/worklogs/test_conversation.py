"""The conversation that `make serve` shows: what is asked of the server, and what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.stub import Reply, served
from tests.helpers.picture_files import shown
from tests.helpers.site import Site

PROGRAM = Path(__file__).resolve().parents[2] / "worklogs/conversation.py"
CALL = ("</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBeijing\n</parameter>\n</function>\n"
        "</tool_call>")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    made = Site(pictures=shown())
    yield made
    made.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=120)


def test_all_that_is_said_is_shown(site):
    off = "</think>\n\n"
    site.engine.say("I will.", "Three and four.\n" + off + "7", "MAPLE_73", CALL.removeprefix(off), "It is sunny.",
                    json.dumps({"name": "Alice", "age": 30}), "It is red.")
    done = run("--base-url", site.url)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines == [
        "you: The secret word is MAPLE_73. Remember it.", "  model: I will.",
        "you: What is 3 + 4?", "  thought: Three and four.", "  model: 7",
        "you: What is the secret word?", "  model: MAPLE_73",
        "you: What is the weather in Beijing?", '  call: get_weather {"city": "Beijing"}',
        'tool: {"temperature": 21, "condition": "sunny"}', "  model: It is sunny.",
        "you: JSON of a person with name Alice and age 30", '  model: {"name": "Alice", "age": 30}',
        "you: [a red square] What colour is this picture?", "  model: It is red."], done.stdout
    assert len(site.engine.requests) == 7 and len(site.engine.pictures[-1]) == 1


def test_a_refusal_ends_it_with_one_line(site):
    done = run("--base-url", site.url, "--model", "other")
    assert done.returncode == 1 and "conversation: " in done.stderr and "other" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


CHUNK = {"choices": [{"index": 0, "delta": {"content": "word"}}]}


@pytest.mark.parametrize(("reply", "why"), [
    (Reply(200, "<html>", "text/html"), "an answer without thoughts, words and calls"),
    (Reply(200, "data: {oops\n\n", "text/event-stream"), "Expecting property name"),
    (Reply(200, f"data: {json.dumps(CHUNK)}\n\ndata: {json.dumps({'error': {'message': 'down'}})}\n\n",
           "text/event-stream"), "down")])
def test_what_is_no_answer_ends_it_with_one_line(reply, why):
    with served(lambda _: reply) as base:
        done = run("--base-url", base)
    assert done.returncode == 1 and f"conversation: {why}" in done.stderr and "Traceback" not in done.stderr, done


def test_chunks_with_nothing_but_usage_are_no_trouble():
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in (usage, CHUNK, usage)) + "data: [DONE]\n\n"
    with served(lambda _: Reply(200, text, "text/event-stream")) as base:
        done = run("--base-url", base)
    assert done.returncode == 0 and done.stdout.count("  model: word\n") == 6, done


def test_what_is_no_address():
    done = run("--base-url", "foo", "--wait", "1")
    assert done.returncode == 2 and "'foo' is not http://HOST:PORT" in done.stderr, done


def test_it_does_not_outlive_who_started_it():
    """A server that did not start leaves nobody waiting for it."""
    with subprocess.Popen(["sleep", "600"]) as server:
        program = subprocess.Popen([sys.executable, PROGRAM, "--base-url", "http://127.0.0.1:9", "--wait",
                                    str(server.pid)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            program.communicate(timeout=3)
        server.kill()
    said, _ = program.communicate(timeout=60)
    assert program.returncode == 1 and said == ""


def test_it_does_not_talk_to_another_server_that_has_the_port(site):
    asked = len(site.engine.requests)
    with subprocess.Popen(["sleep", "600"]) as server:
        done = run("--base-url", site.url, "--wait", str(server.pid))
        server.kill()
    assert (done.returncode, done.stdout, len(site.engine.requests)) == (1, "", asked)
