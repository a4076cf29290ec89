"""Coding agents' round trips: what counts as one, and how the agents are told of our server."""

from __future__ import annotations

import errno
import json
import os
import sys

import pytest

from tests.conformance import recording
from tests.conformance.forcing import Plan
from worklogs import agent_roundtrip, ledger
from worklogs.coding_agents import AGENTS, SHELL, environment
from worklogs.loopback_only import is_alone, leave_network

WORD = "MARZIPAN-1"
ARGUMENTS = {"command": SHELL, "is_background": "false"}
TYPED = {"command": SHELL, "is_background": False}
TOOLS = [{"type": "function", "function": {"name": "bash"}}]
HISTORIES = {
    "chat": {"messages": [
        {"role": "user", "content": "Which word?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "bash", "arguments": json.dumps(TYPED)}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": f"{WORD}\n<done> 1"}]}]},
    "responses": {"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Which word?"}]},
        {"type": "function_call", "call_id": "1", "name": "bash", "arguments": json.dumps(TYPED)},
        {"type": "function_call_output", "call_id": "1", "output": WORD}]},
    "messages": {"messages": [
        {"role": "user", "content": "Which word?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "bash", "input": TYPED}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": WORD}]}]},
}


def request(body: dict, status: int = 200) -> dict:
    return {"method": "POST", "path": "/v1/x", "status": status, "body": body}


def trip(api: str = "chat", **changed) -> agent_roundtrip.Seen:
    whole = HISTORIES[api]
    first = {name: said[:1] for name, said in whole.items()}
    held = {"status": 0, "printed": f"bash\n{agent_roundtrip.MARK} {WORD}\n", "files": {"loud.txt": f"{WORD}\n"},
            "requests": [request({**first, "tools": TOOLS, "stream": True}), request({**whole, "tools": TOOLS})]}
    return agent_roundtrip.Seen(**{**held, **changed})


@pytest.mark.parametrize("api", HISTORIES)
def test_a_round_trip(api):
    assert agent_roundtrip.wrong(trip(api), ARGUMENTS, WORD) == []


@pytest.mark.parametrize(("changed", "words"), [
    ({"status": None}, "did not end in time"),
    ({"status": 3}, "ended with 3"),
    ({"requests": [request(HISTORIES["chat"], 400)]}, "POST /v1/x: 400"),
    ({"requests": [request(HISTORIES["chat"]), request({}, 0)]}, "POST /v1/x: left without an answer"),
    ({"requests": []}, "no request held"),
    ({"requests": [request({"messages": [{"role": "user", "content": WORD}]})]}, "another way"),
    ({"requests": [request({"messages": HISTORIES["chat"]["messages"][2:]})]}, "just our arguments"),
    ({"files": {}}, "file is not there"),
    ({"printed": f"{WORD} {agent_roundtrip.MARK}"}, "did not print"),
])
def test_what_is_none(changed, words):
    found = agent_roundtrip.wrong(trip(**changed), ARGUMENTS, WORD)
    assert any(words in one for one in found), found


def test_other_arguments_are_noticed():
    found = agent_roundtrip.wrong(trip(), {**ARGUMENTS, "more": "1"}, WORD)
    assert len(found) == 1 and "just our arguments" in found[0], found


def test_no_text_is_kept():
    kept = [agent_roundtrip.summary(one) for one in trip("responses").requests]
    assert [one["roles"] for one in kept] == [["user"], ["user", "function_call", "function_call_output"]]
    assert [(one["stream"], one["tools"], one["status"]) for one in kept] == [(True, 1, 200), (False, 1, 200)]
    assert WORD not in json.dumps(kept)


@pytest.mark.parametrize(("name", "api"), [(agent.name, api) for agent in AGENTS.values() for api in agent.apis])
def test_every_agent_knows_our_server_only(name, api, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of somebody")
    agent = AGENTS[name]
    base = Plan("Hello").base("http://127.0.0.1:9")
    begun = agent.start(tmp_path, base, api, "Which word?")
    given = environment(tmp_path, begun.environment)
    written = "".join(path.read_text() for path in tmp_path.rglob("*.json")) + json.dumps(given)
    assert base in written and "Which word?" in begun.arguments
    assert given["HOME"] == str(tmp_path) and "of somebody" not in written
    for task in (agent.read, agent.shell):
        filled = agent_roundtrip.filled(task, tmp_path)
        assert "{secret}" not in "".join(filled.values())


def test_the_network_is_left():
    """In a child: it is for good."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            leave_network()
            status = 0 if is_alone() else 2
        except OSError as error:
            status = 77 if error.errno in (errno.EPERM, errno.ENOSYS, errno.ENOSPC) else 3
            print(error, file=sys.stderr)
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 77:
        pytest.skip("this machine lets nobody here make a network namespace (unshare)")
    assert status == 0


async def test_requests_are_recorded(tmp_path, monkeypatch):
    """As they were sent, with the status; also where the client leaves before there is one."""
    monkeypatch.setenv(recording.FILE, str(tmp_path / "requests"))
    parts = [{"type": "http.request", "body": b'{"a"', "more_body": True}, {"type": "http.request", "body": b": 1}"}]

    async def receive():
        return parts.pop(0)

    async def send(message):
        pass

    async def server(scope, receive, send):
        await receive()
        await receive()
        await send({"type": "http.response.start", "status": 404})

    async def left(scope, receive, send):
        raise ConnectionError

    scope = {"type": "http", "method": "POST", "path": Plan("x").base("") + "/v1/messages"}
    await recording.Recording(server)(scope, receive, send)
    with pytest.raises(ConnectionError):
        await recording.Recording(left)({**scope, "method": "GET", "path": "/v1/models"}, receive, send)
    lines = [json.loads(line) for line in (tmp_path / "requests").read_text().splitlines()]
    assert lines == [{"method": "POST", "path": "/v1/messages", "status": 404, "body": {"a": 1}},
                     {"method": "GET", "path": "/v1/models", "status": 0, "body": None}]


def test_table():
    runs = [{"agent": "pi", "api": "chat", "task": "read", "tool": "read", "outcome": "ok", "seconds": 3.0,
             "requests": [{**agent_roundtrip.summary(one)} for one in trip().requests]},
            {"agent": "pi", "api": "messages", "task": "read", "tool": "read", "outcome": ["POST /v1/x: 400"],
             "seconds": 3.0, "requests": [agent_roundtrip.summary(request({}, 400))]}]
    record = {"packages": {"pi": {"version": "0.73.1"}}, "runs": runs}
    print(ledger.agent_roundtrip([record]))
    assert ledger.agent_roundtrip([record]).splitlines()[2:] == [
        "| pi 0.73.1 | chat | read: `read` | 2 (2 x 200) | 1 | /v1/x | ok |",
        "| pi 0.73.1 | messages | read: `read` | 1 (1 x 400) | 0 | /v1/x | POST /v1/x: 400 |"]
