"""The needle program tells exactly what a server recalls whose memory is known: it reads the end of a text only."""

from __future__ import annotations

import json
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from worklogs import heat_map, needle_recall

# Words that the server remembers, and of the template around the message.
MEMORY, TEMPLATE = 300, 7


class Forgetful(BaseHTTPRequestHandler):
    """One token is one word. It answers with the last code that it remembers where the asked one is forgotten."""

    def do_GET(self) -> None:
        self._answer(200, {"version": "stub"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        text = body["messages"][0]["content"]
        words = text.split()
        owner = re.search(r"code of (\w+)\?", text)[1]
        known = dict(re.findall(r"The code of (\w+) is ([A-Z]+-\d+)\.", " ".join(words[-MEMORY:])))
        said = known.get(owner) or next(iter(known.values()), "I do not know.")
        if self.server.canned is not None:
            self._answer(200, self.server.canned)
            return
        if len(words) > self.server.context:
            self._answer(400, {"error": {"message": "too long", "type": "BadRequestError", "code": 400}})
            return
        count = len(words) + TEMPLATE
        self._answer(200, {
            "id": "x", "object": "chat.completion", "created": 0, "model": "m",
            "usage": {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1},
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}]})

    def _answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""


@pytest.fixture
def server() -> Iterator[Any]:
    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Forgetful)
    made.context, made.bodies, made.canned = 10**6, [], None
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def run(server: Any, *arguments: str) -> int:
    return needle_recall.main(["--base-url", f"http://127.0.0.1:{server.server_port}/v1", *arguments])


def test_what_is_remembered_is_told(server, tmp_path, capsys):
    picture = tmp_path / "needles.svg"
    status = run(server, "--lengths", "200,1000", "--depths", "0,50,100", "--documents", "4", "--keep", "ours",
                 "--out", str(tmp_path / "out"), "--picture", str(picture))
    print(capsys.readouterr().out)
    (path,) = (tmp_path / "out").iterdir()
    record = json.loads(path.read_text())
    assert status == 0 and record["kind"] == "needle-recall" and record["version"] == "stub"
    right = {(row["length"], row["depth"]): (row["right"], row["another"]) for row in record["table"]}
    assert right == {(200, 0): (4, 0), (200, 50): (4, 0), (200, 100): (4, 0),
                     (1000, 0): (0, 4), (1000, 50): (0, 4), (1000, 100): (4, 0)}
    assert all(abs(one["prompt"] - one["length"]) < 0.05 * one["length"] + 10 for one in record["samples"])
    asked = [body for body in server.bodies if body["max_tokens"] > 1]
    assert all(body["temperature"] == 0 for body in asked)
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in asked)
    texts = [body["messages"][0]["content"].rpartition("\n\n")[0] for body in asked]
    assert len(asked) == 24 and len(set(texts)) == 8, "three questions to each of eight texts"
    drawn = ET.fromstring(picture.read_text())
    shown = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert shown.count("4 of 4") == 4 and shown.count("0 of 4") == 2 and {"200", "1,000", "50 %"} <= set(shown), shown
    again = tmp_path / "again.svg"
    assert needle_recall.main(["--draw", str(path), "--picture", str(again)]) == 0
    assert again.read_text() == picture.read_text()


def test_needles_lie_where_they_are_said_to_be():
    found = needle_recall.document("seed", 1000, (0, 30, 100))
    words = found.text.split()
    places = {depth: words.index(f"{code}.") / len(words) for depth, (_, code) in found.needles.items()}
    assert places[0] < 0.01 and abs(places[30] - 0.3) < 0.03 and places[100] > 0.99, places
    assert found == needle_recall.document("seed", 1000, (0, 30, 100)) != needle_recall.document("other", 1000, (0, 30))
    (_, code), (_, other) = found.needles[0], found.needles[30]
    said = (f"It is {code}.", f"**{code}**", other, f"{code} or {other}", code[:-1], "", f"{code}0", f"X{code}")
    assert [found.verdict(0, text) for text in said] == [
        "right", "right", "another", "another", "wrong", "wrong", "wrong", "wrong"]


def test_a_refusal_is_one_line(server, tmp_path, capsys):
    server.context = 500
    assert run(server, "--lengths", "200,1000", "--documents", "1", "--keep", "ours", "--out", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert "needle_recall: BadRequestError" in said.err and "too long" in said.err and not list(tmp_path.iterdir())
    assert said.out.count("   200 tokens, depth") == 5 and "1 of 1 right" in said.out, "what was measured is told"


def test_too_short_for_the_needles(server, capsys):
    assert run(server, "--lengths", "20") == 1
    assert "20 tokens are too few for 5 needles" in capsys.readouterr().err


SAME = {"usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "RIVER-4821"}}]}


@pytest.mark.parametrize(("canned", "why"), [
    (SAME, "usage.prompt_tokens does not grow with the prompt: 9, then 9"), ({**SAME, "usage": None}, "without usage"),
    ({**SAME, "choices": []}, "without usage or choices"), (["RIVER-4821"], "without usage or choices")])
def test_a_server_that_says_the_same_to_all(server, capsys, canned, why):
    server.canned = canned
    assert run(server, "--lengths", "250", "--documents", "1") == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "why"), [
    (["--depths", "0,101"], "from 0 to 100"), (["--lengths", "a"], "no list of numbers"),
    (["--draw", "x.json"], "--draw needs --picture"), (["--documents", "0"], "'0' is no number above 0"),
    (["--base-url", "foo"], "'foo' is not http://HOST:PORT"), (["--base-url", "http://[::"], "is not http://HOST:PORT"),
    (["--base-url", "ftp://x"], "is not http://HOST:PORT"), (["--base-url", "http://x:y"], "is not http://HOST:PORT"),
    (["--draw", "nothing.json", "--picture", "x.svg"], "--draw nothing.json is no record"),
    (["--draw", __file__, "--picture", "x.svg"], "is no record of this program: JSONDecodeError"),
    (["--keep", "ours", "--out", f"{__file__}/x"], "can be no folder"),
    (["--picture", f"{__file__}/x.svg"], "can be no folder")])
def test_bad_options(arguments, why, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        needle_recall.main(arguments)
    error = capsys.readouterr().err
    assert "error:" in error and why in error, error


def test_cells_that_were_not_measured_stay_empty():
    drawn = ET.fromstring(heat_map.svg("a < b", "x", "y", ["1", "2"], ["0 %"], [[None, (1, 2)]]))
    shown = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in shown and "1 of 2" in shown and None in shown, shown
