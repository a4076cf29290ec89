"""How the page is served."""

from __future__ import annotations

import base64
import hashlib
import re

from tests.helpers.fake_engine import FakeEngine, client


def test_it_is_served_at_the_root():
    http = client(FakeEngine())
    got = http.get("/")
    assert got.status_code == 200 and got.headers["content-type"] == "text/html; charset=utf-8"
    assert got.text.startswith("<!doctype html>") and got.headers["cache-control"] == "no-cache"
    assert got.headers["x-content-type-options"] == "nosniff" and got.headers["referrer-policy"] == "no-referrer"
    head = http.head("/")
    assert head.status_code == 200 and head.headers["etag"] == got.headers["etag"]
    assert http.post("/").status_code == 405


def test_it_is_sent_once():
    http = client(FakeEngine())
    tag = http.get("/").headers["etag"]
    for known in (tag, f'"other", W/{tag}', "*"):
        again = http.get("/", headers={"If-None-Match": known})
        assert again.status_code == 304 and not again.content and again.headers["etag"] == tag, known
    assert http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200


def test_its_policy_names_its_own_script_and_style_only():
    got = client(FakeEngine()).get("/")
    policy = dict(part.strip().partition(" ")[::2] for part in got.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'" and "unsafe" not in str(policy)
    for element in ("script", "style"):
        text, = re.findall(rf"<{element}>(.*?)</{element}>", got.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'", element


def test_the_page_needs_no_key_and_the_api_does():
    http = client(FakeEngine(), ["--api-key", "right"])
    assert http.get("/").status_code == 200 and http.get("/v1/models").status_code == 401


def test_it_can_be_left_out():
    http = client(FakeEngine(), ["--disable-web-page"])
    assert http.get("/").status_code == http.head("/").status_code == 404


def test_it_is_no_part_of_the_api():
    assert "/" not in client(FakeEngine()).get("/openapi.json").json()["paths"]


def test_below_a_prefix():
    got = client(FakeEngine(), ["--root-path", "/api"]).get("/")
    assert got.status_code == 200 and '"/v1/' not in got.text, "addresses are relative to the page's own"
