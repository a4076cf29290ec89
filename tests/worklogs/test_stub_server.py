"""The server that measures programs that measure: what it refuses, and that its log leaves no request out."""
import json
import socket
import time

import pytest

from tests.worklogs.stub_process import stub
from worklogs import stub_server


@pytest.mark.parametrize(("text", "words"), [
    ("{", "does not parse"), ("[]", "is no list of answers"), ('[{"status": 200, "chunks": 5}]', "answer 0 is not"),
    ('[{"status": 200, "chunks": [[NaN, "x"]]}]', "answer 0 is not"), ('[{"status": 200}]', "answer 0 is not"),
    ('[{"status": 200, "chunks": [[-1, "x"]]}]', "answer 0 is not"),
    ('[{"status": 9000, "chunks": [[0, "x"]]}]', "answer 0 is not"), ('[{"status": 200, "chunks": []}]', "answer 0")])
def test_what_is_no_recording_is_one_line(text, words, tmp_path, capsys):
    path = tmp_path / "recording.json"
    path.write_text(text)
    assert stub_server.main(["--recording", str(path)]) == 1
    error = capsys.readouterr().err.strip()
    assert words in error and f"--recording {path}: " in error and "\n" not in error


def test_options_that_cannot_be(tmp_path, capsys):
    for port in ("-1", "65536"):
        with pytest.raises(SystemExit) as ended:
            stub_server.main(["--port", port])
        assert ended.value.code == 2 and "--port is from 0" in capsys.readouterr().err
    assert stub_server.main(["--log", str(tmp_path / "no" / "log")]) == 1
    assert "--log " in capsys.readouterr().err


def test_a_request_whose_client_goes_is_in_the_log(tmp_path):
    """What measures a program must know of the answers that the program left, too."""
    slow = stub_server.answer(0.05, 0.05, 40, 10, 0)
    with stub(tmp_path, [slow]) as (url, log, _):
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"messages": []}).encode()
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (
                len(body), body))
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        until = time.monotonic() + 20
        while not log.exists():
            assert time.monotonic() < until, "it is not in the log"
            time.sleep(0.02)
        for text in (b"no JSON", b"[]"):
            with socket.create_connection((host, int(port))) as client:
                client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (
                    len(text), text))
                assert client.recv(100).startswith(b"HTTP/1.1 400")
    entry, = map(json.loads, log.read_text().splitlines())
    assert entry["id"] == "stub-0" and 1 <= len(entry["flushed_s"]) < len(slow["chunks"])
