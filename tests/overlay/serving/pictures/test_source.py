"""Content parts that hold a picture, in the forms that clients send."""

from __future__ import annotations

import pytest

from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.messages import normalise_messages

URL = "data:image/png;base64,AAAA"


@pytest.mark.parametrize(("part", "field", "url"), [
    ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, ".image_url", URL),
    ({"type": "image_url", "image_url": {"url": URL, "detail": None}}, ".image_url", URL),
    ({"type": "image_url", "image_url": URL}, ".image_url", URL),
    ({"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None}, ".image_url", URL),
    ({"type": "image", "image": URL}, ".image", URL), ({"type": "image", "image_url": URL}, ".image_url", URL),
    ({"type": "image", "url": URL}, ".url", URL), ({"image_url": {"url": URL}}, ".image_url", URL),
    ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}, ".source",
     "data:;base64,AAAA"),
    ({"type": "image", "source": {"type": "url", "url": "https://a/b"}}, ".source.url", "https://a/b"),
])
@pytest.mark.parametrize("role", ["user", "tool", "function"])
def test_forms(part, field, url, role):
    (message,), (source,) = normalise_messages([{"role": role, "content": [part]}])
    assert message["content"] == [{"type": "image"}]
    assert (source.path, source.url) == (f"messages[0].content[0]{field}", url)
    assert "AAAA" not in repr(source) and "AAAA" not in repr(message)


def test_order_is_kept_and_neighbouring_text_is_joined():
    a, b = ({"type": "image_url", "image_url": {"url": f"data:,{name}"}} for name in "ab")
    texts = [{"type": "text", "text": text} for text in ("1", "2", "", "3")]
    messages, sources = normalise_messages([
        {"role": "user", "content": [texts[0], texts[1], a, texts[2], b, texts[3]]}, {"role": "user", "content": [a]}])
    assert messages[0]["content"] == [{"type": "text", "text": "12"}, {"type": "image"}, {"type": "image"},
                                      {"type": "text", "text": "3"}]
    assert [source.path for source in sources] == [
        "messages[0].content[2].image_url", "messages[0].content[4].image_url", "messages[1].content[0].image_url"]
    assert [source.url for source in sources] == ["data:,a", "data:,b", "data:,a"]


@pytest.mark.parametrize(("part", "param", "code"), [
    ({"type": "image_url"}, ".image_url", "missing_required_parameter"),
    ({"type": "image_url", "image_url": {}}, ".image_url.url", "missing_required_parameter"),
    ({"type": "image_url", "image_url": 5}, ".image_url", "invalid_type"),
    ({"type": "image_url", "image_url": [URL]}, ".image_url", "invalid_type"),
    ({"type": "image_url", "image_url": {"url": 5}}, ".image_url", "invalid_type"),
    ({"type": "image_url", "image_url": {"url": " "}}, ".image_url", "invalid_value"),
    ({"type": "image_url", "image_url": {"url": URL, "detail": 5}}, ".image_url.detail", "invalid_type"),
    ({"type": "input_image", "file_id": "file-1"}, ".file_id", "unsupported_parameter"),
    ({"type": "image", "source": "x"}, ".source", "invalid_type"),
    ({"type": "image", "source": {"type": "base64"}}, ".source.data", "missing_required_parameter"),
    ({"type": "video_url", "video_url": {"url": URL}}, "", "unsupported_parameter"),
    ({"type": "video", "video": [URL]}, "", "unsupported_parameter"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "", "unsupported_parameter"),
    ({"type": "file", "file": {"file_data": URL}}, "", "unsupported_parameter"),
])
def test_refused_by_name(part, param, code):
    with pytest.raises(RequestError) as caught:
        normalise_messages([{"role": "user", "content": ["x", part]}])
    assert (caught.value.param, caught.value.code) == (f"messages[0].content[1]{param}", code), caught.value.message
    assert "AAAA" not in caught.value.message


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_roles_that_show_no_pictures(role):
    with pytest.raises(RequestError, match=f"not in a {role} message") as caught:
        normalise_messages([{"role": role, "content": [{"type": "image_url", "image_url": URL}]}])
    assert caught.value.param == "messages[0].content[0]"
