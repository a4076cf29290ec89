"""Pictures from addresses: public hosts only, however they are named; limited in size and time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest

from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.pictures import remote

PATH = "messages[0].content[0].image_url"


@pytest.mark.parametrize("address", [
    "127.0.0.1", "127.255.0.3", "10.0.0.1", "172.16.5.5", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1",
    "192.0.0.8", "198.18.0.1", "192.0.2.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.88.99.1", "::", "::1",
    "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::", "2002:c0a8:101::1", "64:ff9b:1::1", "2001:0:1::1", "localhost", "", "2130706433",
    "0x7f.1", "127.1", "1.2.3",
])
def test_addresses_that_are_never_asked(address):
    assert not remote.is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8",
                                     "64:ff9b::808:808", "2002:808:808::1", "100.128.0.1", "172.32.0.1"])
def test_public_addresses(address):
    assert remote.is_public(address)


class Host:
    """A server on this machine that is taken for a public one, as ``picture.test``; names: what others stand for."""

    def __init__(self, monkeypatch):
        self.answer = b""
        self.delay = 0.0
        self.requests: list[bytes] = []
        self.names = {"picture.test": ["127.0.0.1"]}
        self.asked: list[str] = []
        self.public = remote.is_public
        monkeypatch.setattr(remote, "is_public", lambda address: address == "127.0.0.1" or self.public(address))
        monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", self._resolve)

    async def _resolve(self, name, port, **_):
        self.asked.append(name)
        if name not in self.names:
            raise socket.gaierror(f"no {name}")
        return [(socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port))
                for one in self.names[name]]

    async def _serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            answer = self.answer if isinstance(self.answer, bytes) else self.answer.pop(0)
            for piece in ([answer] if not self.delay else [answer[i:i + 1] for i in range(len(answer))]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(self.delay)
            writer.close()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, sock=_socket())
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()

    def url(self, host="picture.test", path="/a.png?key=secret"):
        return f"http://{host}:{self.port}{path}"


def _socket():
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    return made


def ok(body: bytes, *headers: str) -> bytes:
    return "\r\n".join(("HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers, "", "")).encode() + body


def to(location: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


async def refused(url: str, words: str, **limits) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        await remote.fetch(url, PATH, limits.pop("max_bytes", 1000), **limits)
    assert caught.value.param == PATH and "secret" not in caught.value.message, caught.value.message


async def test_a_picture(monkeypatch):
    async with Host(monkeypatch) as host:
        host.answer = ok(b"x" * 1000)
        assert await remote.fetch(host.url(), PATH, 1000) == b"x" * 1000
        assert b"Host: picture.test" in host.requests[0] and b"GET /a.png?key=secret" in host.requests[0]
        host.answer = [to("/b"), to(host.url(path="/c")), ok(b"y")]
        assert await remote.fetch(host.url(), PATH, 1000) == b"y"
        assert [request.split()[1] for request in host.requests[1:]] == [b"/a.png?key=secret", b"/b", b"/c"]


async def test_limits(monkeypatch):
    async with Host(monkeypatch) as host:
        host.answer = ok(b"x" * 1001)
        await refused(host.url(), "1001 bytes or more")
        host.answer = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000
        await refused(host.url(), "bytes or more")
        host.answer = ok(b"x" * 50)[:-10]
        await refused(host.url(), "could not be fetched")
        host.answer = [to("/b")] * 4
        await refused(host.url(), "more than 3 times")
        for answer in (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b"nonsense\r\n\r\n", b""):
            host.answer = answer
            await refused(host.url(), "status 404|could not be fetched")
        host.answer, host.delay = ok(b"x" * 500), 0.05
        start = time.monotonic()
        await refused(host.url(), "within 0.4 s", timeout=0.4)
        assert time.monotonic() - start < 2


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["::1"], ["127.0.0.1", "192.168.0.1"], ["::ffff:169.254.169.254"]])
async def test_names_of_private_hosts(monkeypatch, addresses):
    async with Host(monkeypatch) as host:
        host.names["inside.test"] = addresses
        host.answer = [to(host.url("inside.test")), ok(b"x")]
        await refused(host.url("inside.test"), "not on the public internet")
        assert not host.requests, "it was asked"
        await refused(host.url(), "not on the public internet")
        assert len(host.requests) == 1, "the redirect was followed"


async def test_a_name_that_changes_its_address(monkeypatch):
    """What was checked is what is asked: the name is resolved once."""
    async with Host(monkeypatch) as host:
        host.answer = ok(b"x")
        answers = [["127.0.0.1"], ["10.0.0.1"]]
        monkeypatch.setattr(host, "names", type("Rebinding", (dict,), {
            "__contains__": lambda *_: True, "__getitem__": lambda *_: answers.pop(0)})())
        assert await remote.fetch(host.url(), PATH, 1000) == b"x"
        assert host.asked == ["picture.test"]


@pytest.mark.parametrize("url", [
    "http://10.0.0.1/x", "http://169.254.169.254/latest/meta-data", "http://[::1]/x", "http://[::ffff:10.0.0.1]/x",
    "http://2130706434/x", "http://0.0.0.0/x", "https://192.168.0.1/x", "http://localhost/x", "http://0x7f.2/x",
    "ftp://picture.test/x", "file:///etc/passwd", "http:///x", "http://user:secret@picture.test/x", "http://[oops/x",
    "http://picture.test:99999/x", "gopher://picture.test/x", "http://nowhere.test/x",
])
async def test_addresses_that_are_refused(monkeypatch, url):
    async with Host(monkeypatch) as host:
        host.names.update({"localhost": ["::1"], "0x7f.2": ["127.0.0.2"]})
        await refused(url, "could not be fetched")
        assert not host.requests
