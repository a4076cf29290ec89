"""Data URLs as clients write them."""

from __future__ import annotations

import base64

import pytest

from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.pictures.data_url import decode_data_url, is_data_url

DATA = bytes(range(256)) * 3 + b"\xfb\xff\xfe"
PLAIN = base64.b64encode(DATA + b"x").decode()
SAFE = base64.urlsafe_b64encode(DATA + b"x").decode()


def lines(text):
    return "\r\n".join(text[i:i + 76] for i in range(0, len(text), 76)) + "\n"


@pytest.mark.parametrize("url", [
    f"data:image/png;base64,{PLAIN}", f"data:image/png;base64,{PLAIN.rstrip('=')}", f"data:image/png;base64,{SAFE}",
    f"data:image/png;base64,{SAFE.rstrip('=')}", f"data:;base64,{PLAIN}", f"data:base64,{PLAIN}",
    f"data:text/plain;charset=utf-8;base64,{PLAIN}", f"DATA:IMAGE/PNG;BASE64,{PLAIN}",
    f"data:image/png;base64,{lines(PLAIN)}", f"  data:image/png;base64, {PLAIN} ",
    "data:image/png;base64," + PLAIN.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
    "data:image/png," + "".join(f"%{byte:02x}" for byte in DATA + b"x"),
])
def test_forms(url):
    assert is_data_url(url)
    assert decode_data_url(url, "p", 10_000) == DATA + b"x"


@pytest.mark.parametrize("length", range(9))
def test_all_lengths_around_a_group_of_four_across_pieces(length, monkeypatch):
    monkeypatch.setattr("vllm.overlay.serving.pictures.data_url._PIECE", 5)
    data = DATA[:20 + length]
    for text in (base64.b64encode(data).decode(), lines(base64.b64encode(data).decode().rstrip("="))):
        assert decode_data_url(f"data:;base64,{text}", "p", 100) == data


@pytest.mark.parametrize("data", ["A", "AAAAA", "AA=A", "AA==AA==", "AAA!", "AA\0A", "é", "AAAA" * 300_000 + "=A",
                                  "====A"])
def test_what_is_no_base64(data):
    with pytest.raises(RequestError, match="not valid base64") as caught:
        decode_data_url(f"data:image/png;base64,{data}", "messages[0].content[1].image_url", 10**7)
    assert caught.value.param == "messages[0].content[1].image_url" and len(caught.value.message) < 120


def test_empty_without_comma_and_too_large():
    for url, words in (("data:image/png;base64,", "no data"), ("data:image/png;base64,==", "no data"),
                       ("data:image/png;base64", "without a comma"),
                       (f"data:;base64,{PLAIN}", "at most 100 bytes"),
                       (f"data:;base64,{PLAIN[:160]}", "at most 100 bytes"),
                       ("data:,abc" * 30, "at most 100 bytes")):
        with pytest.raises(RequestError, match=words):
            decode_data_url(url, "p", 100)
    assert len(decode_data_url(f"data:;base64,{PLAIN[:132]}", "p", 100)) == 99


@pytest.mark.parametrize("url", ["https://a/b", "file:///etc/passwd", "", "dat", "image/png;base64,AAAA"])
def test_what_is_no_data_url(url):
    assert not is_data_url(url)
