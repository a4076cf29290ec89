"""What a person does at the page, in a real browser."""

from __future__ import annotations

import base64
import re
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.fake_engine import tokenizer
from tests.helpers.forced import call

ANSWER = "Hm, 2 and 2.\n</think>\n\nIt is <b>4</b>.\n\n```py\nprint(2 + 2)\n```\nDone."
UNTHOUGHT = "It is 4."
IDLE = "document.querySelector('#stop').disabled"


def ask(page, text, wait=True):
    page.write(text, into="#question")
    page.press("Enter")
    if wait:
        page.until(f"{IDLE} && document.querySelectorAll('.assistant').length > 0")


def prompt(site, number=-1) -> str:
    """The prompt of a request, as the model read it."""
    return tokenizer().decode(site.engine.requests[number][0])


def test_a_question_and_its_answer(page, site):
    site.engine.say(ANSWER)
    ask(page, "What is 2+2?")
    assert page.texts(".user .text") == ["What is 2+2?"] and page.js("document.querySelector('#question').value") == ""
    assert page.text(".assistant > .text").startswith("It is <b>4</b>."), "what a model says is no HTML"
    assert page.texts(".assistant pre") == ["print(2 + 2)"] and page.js("document.querySelector('b')") is None
    figures = page.text(".figures")
    tokens = len(site.engine.requests[0][0])
    assert figures.startswith(f"{tokens} prompt tokens ({tokens - 4} cached), "), figures
    assert re.search(r" generated \(\d+ thought\), first token after [\d.]+ s, [\d.]+ tokens/s$", figures), figures
    assert prompt(site).endswith("What is 2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"), prompt(site)


def test_thoughts_are_folded(page, site):
    site.engine.say(ANSWER)
    ask(page, "What is 2+2?")
    assert page.text(".thought summary") == "Thought" and "Hm" not in page.text(".assistant")
    page.click(".thought summary")
    assert "Hm, 2 and 2." in page.text(".thought div")


def test_it_streams_and_is_stopped(page, site):
    site.engine.say("A thought.\n</think>\n\n" + "word " * 2000, delay=0.002)
    ask(page, "Go on for ever", wait=False)
    page.until("document.querySelector('.thought summary')?.innerText.startsWith('Th')")
    page.until("(document.querySelector('.assistant > .text')?.innerText || '').includes('word word')")
    assert page.js("document.querySelector('#log').ariaBusy") == "true" and page.js(
        "document.querySelector('#send').disabled") and "prompt tokens" in page.text(".figures")
    page.click("#stop")
    page.until(IDLE)
    assert page.texts(".note") == ["Stopped."] and "prompt tokens" in page.text(".figures")
    said = page.text(".assistant > .text")
    deadline = time.monotonic() + 10
    while not site.engine.aborted:
        assert time.monotonic() < deadline, "the engine goes on"
        time.sleep(0.01)
    assert 0 < len(said) < 9000 and page.text(".assistant > .text") == said
    site.engine.say("Hm.\n</think>\n\nYes.")
    ask(page, "Still there?")
    assert page.texts(".assistant > .text")[1] == "Yes." and said.strip()[:9] in prompt(site)


def test_escape_stops(page, site):
    site.engine.say("word " * 2000, delay=0.002)
    ask(page, "Go on for ever", wait=False)
    page.until("document.querySelector('.thought:not([hidden])')")
    page.press("Escape")
    page.until(IDLE)
    assert page.texts(".note") == ["Stopped."]


def test_enter_with_shift_begins_a_line(page, site):
    page.write("one", into="#question")
    page.press("Enter", shift=True)
    page.write("two")
    assert page.js("document.querySelector('#question').value") == "one\ntwo" and not page.texts(".user")
    page.click("#send")
    page.until(f"{IDLE} && document.querySelector('.assistant .figures')")
    assert "one\ntwo<|im_end|>" in prompt(site)


def test_tools_are_run_and_their_results_sent_back(page, site):
    expressions = {"2 * (3 + 4)": "14", "-2^2 + 7 % 4": "-1", "sqrt(16) / 0.5": "8", "2 ** 3 ** 2": "512",
                   "round(10 / 3) - abs(-1)": "2", "1e3 × .5": "500",
                   "2 +": "error: it ends too early", "alert(1)": "error: “alert” was not expected",
                   "constructor": "error: “constructor” was not expected", "1 2": "error: “2” was not expected"}
    calls = [call("calculate", ("expression", one)) for one in expressions]
    calls += [call("current_time", ("time_zone", "Asia/Shanghai")), call("unknown"),
              call("current_time", ("time_zone", "Nowhere"))]
    site.engine.say("I compute.\n</think>\n\n" + "\n".join(calls), "Good.\n</think>\n\nIt is 14.")
    page.choose("#tools", True)
    ask(page, "What is 2 * (3 + 4)?")
    page.until("document.querySelectorAll('.assistant').length === 2")
    results = page.texts(".call .result")
    assert results[:len(expressions)] == list(expressions.values()), results
    time_, unknown, nowhere = results[len(expressions):]
    assert "20" in time_ and not time_.startswith("error") and unknown == "error: there is no tool unknown", results
    assert nowhere.startswith("error: ") and "Nowhere" in nowhere, nowhere
    assert page.texts(".call summary")[0] == "Tool: calculate" and "2 * (3 + 4)" in page.texts(".call .arguments")[0]
    assert page.texts(".assistant > .text")[1] == "It is 14."
    first, second = prompt(site, 0), prompt(site, 1)
    assert '"name": "calculate"' in first and '"name": "current_time"' in first
    assert "<function=calculate>\n<parameter=expression>\n2 * (3 + 4)\n</parameter>" in second, second
    assert "<tool_response>\n14\n</tool_response>\n<tool_response>\n-1\n</tool_response>" in second, second
    assert "I compute." in second, "the thought before a call belongs to the turn"


def test_a_model_that_calls_for_ever_is_ended(page, site):
    site.engine.say("\n</think>\n\n" + call("calculate", ("expression", "1")))
    page.choose("#tools", True)
    ask(page, "Loop")
    page.until("document.querySelector('.error[role=alert]:not([hidden])')")
    assert page.texts(".assistant .error") == ["Ended after 8 answers that call tools."]
    assert len(site.engine.requests) == 8


def test_a_call_that_is_cut_is_not_run(page, site):
    site.engine.say("\n</think>\n\n" + call("calculate", ("expression", "1 + 1" * 20)))
    page.choose("#tools", True)
    page.choose("#limit", "30")
    ask(page, "Cut")
    assert page.texts(".note") == ["Cut: the limit of tokens was reached."] and not page.texts(".result")
    assert site.engine.requests[0][1].max_tokens == 30


def test_a_picture(page, site, tmp_path):
    file = tmp_path / "red.png"
    Image.new("RGB", (64, 64), (255, 0, 0)).save(file)
    text = tmp_path / "no picture.txt"
    text.write_text("hello")
    page.pick("#file", file, text)
    page.until("document.querySelector('#chosen img')")
    assert page.text("#notice") == "no picture.txt is no PNG, JPEG, WebP or GIF."
    page.pick("#file", file)
    page.until("document.querySelectorAll('#chosen img').length === 2")
    page.click("#chosen button", 1)
    sent = page.js("""new Promise((resolve) => {
        const before = window.fetch;
        window.fetch = (url, options) => {
            if (options.body) { window.fetch = before; window.sent = JSON.parse(options.body); }
            return before(url, options);
        };
        resolve(true);
    })""")
    assert sent
    ask(page, "What colour?")
    parts = page.js("window.sent.messages[0].content")
    assert [part["type"] for part in parts] == ["image_url", "text"] and parts[1]["text"] == "What colour?"
    kind, _, data = parts[0]["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64" and base64.b64decode(data) == file.read_bytes()
    assert page.js("document.querySelector('.user img').naturalWidth") == 64 and not page.texts("#chosen img")


def test_what_the_server_could_not_read_is_no_picture(page, tmp_path):
    """It would be sent again with every further question."""
    for name, content, why in (("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG, JPEG, WebP or GIF"),
                               ("b.bmp", b"BM", "is no PNG, JPEG, WebP or GIF"),
                               ("c.png", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read as a picture"),
                               ("d.png", b"", "cannot be read as a picture")):
        (tmp_path / name).write_bytes(content)
        page.pick("#file", tmp_path / name)
        page.until(f"document.querySelector('#notice').textContent === '{name} {why}.'")
    assert not page.texts("#chosen img")


def test_pictures_keep_their_order_and_are_waited_for(page, site, tmp_path):
    large, small = tmp_path / "large.png", tmp_path / "small.png"
    Image.effect_noise((2000, 2000), 90).save(large)
    Image.new("RGB", (8, 8)).save(small)
    page.write("Two", into="#question")
    page.pick("#file", large, small)
    page.press("Enter")
    if page.text("#notice"):
        assert page.text("#notice") == "A picture is still being read." and not site.engine.requests
    page.until("document.querySelectorAll('#chosen img').length === 2 || document.querySelectorAll('.user img').length")
    widths = page.js("[...document.querySelectorAll('#chosen img, .user img')].map((one) => one.naturalWidth)")
    assert widths == [2000, 8]


def test_settings_reach_the_request(page, site):
    page.write("Be brief.", into="#system")
    for field, value in (("#thinking", "off"), ("#temperature", "0.3"), ("#limit", "50"), ("#form", "json_schema")):
        page.choose(field, value)
    page.choose("#schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    site.engine.say('{"a": 1}')
    ask(page, "An object")
    _, params, _ = site.engine.requests[0]
    assert (params.temperature, params.max_tokens) == (0.3, 50)
    assert "Be brief." in prompt(site) and prompt(site).endswith("<think>\n\n</think>\n\n"), prompt(site)
    assert page.text(".assistant > .text") == '{"a": 1}' and not page.js("document.querySelector('.thought').open")
    page.load()
    page.until("document.querySelector('#model').value === 'llm'")
    kept = page.js("['system', 'thinking', 'temperature', 'limit', 'form'].map("
                   "(id) => document.getElementById(id).value)")
    assert kept == ["Be brief.", "off", "0.3", "50", "json_schema"]
    page.choose("#schema", "{")
    page.write("Again", into="#question")
    page.press("Enter")
    assert "The JSON schema is not JSON" in page.text("#notice") and len(site.engine.requests) == 1
    page.choose("#form", "")
    page.choose("#temperature", "3")
    page.click("#send")
    assert len(site.engine.requests) == 1, "a temperature of 3 is not sent"


def test_json_mode(page, site):
    page.choose("#form", "json_object")
    site.engine.say('Hm.\n</think>\n\n{"a": 1}')
    ask(page, "An object")
    assert page.text(".assistant > .text") == '{"a": 1}'


def test_errors_are_shown_and_tried_again(page, site):
    page.choose("#limit", "999999")
    ask(page, "Too much")
    assert "400: " in page.text(".assistant .error") and "max_tokens" in page.text(".assistant .error")
    page.choose("#limit", "")
    site.engine.say("Hm.\n</think>\n\nHere.")
    page.click(".again")
    page.until(f"{IDLE} && document.querySelector('.assistant > .text').innerText === 'Here.'")
    assert not page.texts(".assistant .error") and len(page.texts(".user")) == 1
    site.engine.say("A thought.\n</think>\n\nIt begins", error=RuntimeError("x"), error_after=12)
    ask(page, "And now")
    assert "failed on request" in page.texts(".assistant .error")[0], page.text("#log")
    page.offline(True)
    page.click(".again")
    page.until(f"{IDLE} && document.querySelector('.assistant .error')?.innerText.includes('fetch')")
    page.offline(False)


def test_conversations_are_kept(page, site):
    site.engine.say("Hm.\n</think>\n\nFirst.")
    ask(page, "One")
    page.click("#new")
    assert page.texts("#list .open") == ["New conversation", "One"] and not page.texts("#log article")
    site.engine.say("Hm.\n</think>\n\nSecond.")
    ask(page, "Two")
    assert "One" not in prompt(site), "a conversation knows nothing of another one"
    page.load()
    assert page.texts("#list .open") == ["Two", "One"] and page.texts(".assistant > .text") == ["Second."]
    page.click("#list .open", 1)
    assert page.texts(".assistant > .text") == ["First."] and page.js(
        "document.querySelector('#list [aria-current=true]').innerText") == "One"
    site.engine.say("Hm.\n</think>\n\nThird.")
    page.until("document.querySelector('#model').value === 'llm'")
    ask(page, "More")
    assert "First." in prompt(site) and "Hm." not in prompt(site)
    page.click("#list li button[aria-label^=Delete]", 1)
    page.until("document.querySelectorAll('#list li').length === 1")
    assert page.said == ["Delete “One”?"] and page.texts("#list .open") == ["Two"]


def test_an_answer_goes_on_while_another_conversation_is_looked_at(page, site):
    site.engine.say("Hm.\n</think>\n\n" + "word " * 100, delay=0.004)
    ask(page, "Long", wait=False)
    page.until("(document.querySelector('.assistant > .text')?.innerText || '').includes('word')")
    page.click("#new")
    assert not page.texts("#log article")
    page.click("#list .open", 1)
    page.until(IDLE)
    assert page.text(".assistant > .text").split() == ["word"] * 100


def test_two_tabs_lose_nothing_of_each_other(chrome, site):
    """Each looks at its own conversation, also while one of them is being answered."""
    profile = chrome.profile()
    with chrome.open(site.url, profile) as one, chrome.open(site.url, profile) as other:
        for page in (one, other):
            page.until("document.querySelector('#model').value === 'llm'")
        site.engine.say("Hm.\n</think>\n\n" + "word " * 100, "Hm.\n</think>\n\nShort.", delay=0.01)
        ask(one, "In one", wait=False)
        one.until("(document.querySelector('.assistant > .text')?.innerText || '').includes('word')")
        other.until("document.querySelector('#list .open').innerText === 'In one'")
        other.click("#new")
        ask(other, "In other")
        assert other.texts(".assistant > .text") == ["Short."]
        assert one.texts(".user .text") == ["In one"] and not one.js(IDLE), "it goes on, and is looked at"
        one.until(IDLE)
        assert one.text(".assistant > .text").split() == ["word"] * 100
        for page in (one, other):
            page.until("document.querySelectorAll('#list .open').length === 2")
        assert other.texts(".user .text") == ["In other"], "what another tab looks at is not this one's matter"
        one.load()
        for number, text in enumerate(["Short.", "word"]):
            one.click("#list .open", number)
            assert one.text(".assistant > .text").split()[0] == text
        site.engine.say("word " * 2000, delay=0.01)
        ask(one, "Deleted", wait=False)
        one.until("document.querySelector('.thought:not([hidden])')")
        other.click("#list li button[aria-label^=Delete]", 1)
        one.until(f"{IDLE} && document.querySelectorAll('#list .open').length === 1")
        assert one.texts("#list .open") == other.texts("#list .open") == ["In other"]
        assert one.errors == other.errors == []


def test_what_had_come_of_an_answer_is_there_after_a_reload(page, site):
    site.engine.say("Hm.\n</think>\n\n" + "word " * 2000, delay=0.005)
    ask(page, "Long", wait=False)
    page.until("(document.querySelector('.assistant > .text')?.innerText || '').includes('word')")
    page.load()
    page.until("document.querySelector('#model').value === 'llm'")
    assert page.text(".assistant > .text").startswith("word") and page.texts(".note") == ["Stopped."]
    site.engine.say("Hm.\n</think>\n\nAgain.")
    page.click(".again")
    page.until("document.querySelector('.assistant > .text')?.innerText === 'Again.'")


def test_an_api_key(chrome, guarded):
    guarded.engine.say("Hm.\n</think>\n\nCome in.")
    with chrome.open(guarded.url) as page:
        page.until("document.querySelector('#server').innerText === 'not connected'")
        assert "401: Invalid or missing API key." in page.text("#notice")
        assert page.js("document.activeElement.id") == "key"
        page.write("right", into="#key")
        page.press("Tab")
        page.until("document.querySelector('#server').innerText.startsWith('context of')")
        ask(page, "Hello")
        assert page.text(".assistant > .text") == "Come in." and not page.text("#notice")
        assert not page.js("JSON.stringify(localStorage).includes('right')"), "a key is not kept beyond the tab"


def test_a_full_storage_is_told_of(page, site):
    page.js("Storage.prototype.setItem = function () { throw new DOMException('full', 'QuotaExceededError'); }")
    ask(page, "Hello")
    assert "Conversations cannot be kept: full" in page.text("#notice") and page.texts(".assistant")


def test_what_was_kept_and_cannot_be_read_is_told_of(page, site):
    page.js("localStorage.setItem('vllm-chat', '{')")
    page.load()
    page.until("document.querySelector('#model').value === 'llm'")
    assert "What this page had kept cannot be read" in page.text("#notice")


def test_a_stream_that_is_cut_anywhere_is_read_whole(page):
    """A byte at a time: through characters of several bytes, and between the two that end a line."""
    page.js(r"""(() => {
        const chunk = (delta, more = {}) =>
            "data: " + JSON.stringify({choices: [{index: 0, delta, ...more}]}) + "\r\n\r\n";
        const bytes = new TextEncoder().encode(": a comment\n\n" + chunk({reasoning_content: "想 🎉"})
            + chunk({content: "中文 🇨🇳 "}) + chunk({content: "é"}, {finish_reason: "stop"}) + "data: [DONE]\n\n");
        const before = window.fetch;
        window.fetch = (url, options) => options.body ? Promise.resolve(new Response(new ReadableStream({start(out) {
            for (const byte of bytes) out.enqueue(Uint8Array.of(byte));
            out.close();
        }}))) : before(url, options);
    })()""")
    ask(page, "Bytes")
    assert page.texts(".assistant > .text") == ["中文 🇨🇳 é"] and not page.texts(".assistant .error")
    assert page.js("document.querySelector('.thought div').textContent") == "想 🎉"


def test_it_can_be_used_without_sight_and_without_a_mouse(page, site):
    site.engine.say(ANSWER)
    ask(page, "What is 2+2?")
    assert page.unnamed_controls() == []
    seen = []
    page.js("document.body.focus(), document.activeElement.blur()")
    for _ in range(40):
        page.press("Tab")
        seen.append(page.js("document.activeElement.id || document.activeElement.className || "
                            "document.activeElement.tagName"))
    for name in ("skip", "model", "key", "new", "system", "thinking", "tools", "log", "question", "send", "attach"):
        assert name in seen, (name, seen)
    assert page.js("document.documentElement.lang") == "en" and page.js("document.querySelectorAll('h1').length") == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours(page, site, scheme):
    site.engine.say(ANSWER)
    ask(page, "What is 2+2?")
    other = {"light": "dark", "dark": "light"}[scheme]
    page.scheme(scheme)
    assert _bright(page) is (scheme == "light")
    page.choose("#theme", other)
    assert _bright(page) is (other == "light"), "the person's choice goes before the system's"
    for selector in ("body", ".figures", "#send", ".user", "summary"):
        assert _contrast(page, selector) >= 4.5, (selector, _contrast(page, selector))


def _colour(page, selector: str, name: str) -> list[float]:
    return page.js(f"""(() => {{
        for (let element = document.querySelector('{selector}'); element; element = element.parentElement) {{
            const found = getComputedStyle(element)['{name}'].match(/[\\d.]+/g).map(Number);
            if (found.length < 4 || found[3]) return found.slice(0, 3);
        }}
    }})()""")


def _luminance(colour: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(page, selector: str) -> float:
    """As the WCAG reckon it."""
    one, two = sorted(_luminance(_colour(page, selector, name)) for name in ("color", "backgroundColor"))
    return (two + 0.05) / (one + 0.05)


def _bright(page) -> bool:
    return _luminance(_colour(page, "body", "backgroundColor")) > 0.5


def test_nothing_foreign_runs_or_is_fetched(page):
    """What the policy forbids, it forbids in a browser."""
    assert page.js("""new Promise((resolve) => {
        document.addEventListener('securitypolicyviolation', (event) => resolve(event.effectiveDirective));
        const image = new Image(); image.src = 'https://example.com/x.png';
    })""") == "img-src"
    with pytest.raises(RuntimeError, match="TrustedHTML|trusted"):
        page.js("document.body.innerHTML = '<b>x</b>'")
    assert page.js("fetch('https://example.com/').then(() => 'sent', () => 'refused')") == "refused"
    assert page.js("(() => { const s = document.createElement('script'); s.append('window.ran = 1');"
                   "document.body.append(s); return window.ran })()") is None
    assert page.errors and all("Content Security Policy" in one or "Trusted" in one or "TrustedScript" in one
                               for one in page.errors), page.errors
    page.errors.clear()


def test_the_file_is_whole_in_itself():
    page = Path(__file__).resolve().parents[2] / "vllm_overrides/overlay/serving/page/index.html"
    text = page.read_text(encoding="utf-8")
    for foreign in ("http://", "https://", " src=", "@import", "url(", "innerHTML", "eval(", " style=", " onclick"):
        assert foreign not in text, foreign
