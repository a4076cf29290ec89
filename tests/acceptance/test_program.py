"""The program as a whole: lines, report, exit status, choice of checks, going on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance import harness as under_test
from tests.acceptance import serve
from tests.acceptance.answers import RIGHT, SKIPPED, WRONG
from tests.acceptance.program import keep, main
from tests.acceptance.questions import QUESTIONS
from tests.acceptance.stub import Reply, Script, served, streams, words
from tests.acceptance.table import NOT_SCORED

ROOT = Path(__file__).resolve().parents[2]
LONG = streams(*words(3), usage={"completion_tokens": 10})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test.time, "sleep", lambda _: None)


def replies(**others) -> list[Reply]:
    """Right answers to all checks but some, and to the long-output module."""
    return [*(reply for name in QUESTIONS for reply in others.get(name, RIGHT[name][0])), LONG]


def run(script: Script, *arguments: str) -> int:
    with served(script) as base:
        return main(["--base-url", base + "/v1", "--concurrency", "1", "--long-tokens", "10", *arguments])


def test_all_is_right(capsys, tmp_path):
    script = Script(replies())
    assert run(script, "--report", str(tmp_path / "new" / "report.json")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("a bare engine, by /version; thinking switch kwargs_thinking; thinks without one; "
                             "max_model_len 262144"), lines[0]
    assert [line.split()[:2] for line in lines[1:-1]] == [["PASS", name] for name in [*QUESTIONS, "long_output"]]
    assert lines[-1] == "52 of 52 scored checks passed; long output: PASS"
    assert [line.split()[1] for line in lines if "(not scored)" in line] == list(NOT_SCORED)
    report = json.loads((tmp_path / "new" / "report.json").read_text(encoding="utf-8"))
    assert report["totals"] == {"PASS": 52, "FAIL": 0, "SKIP": 0, "long_output": "PASS"}, report["totals"]
    assert [one["id"] for one in report["checks"]] == [*QUESTIONS, "long_output"]
    assert (report["direct"], report["thinking_switch"], report["version"]) == (
        "/version", "kwargs_thinking", {"version": "1"}), report
    assert all(one["why"] for one in report["checks"]), "a pass tells what was seen"
    assert not list((tmp_path / "new").glob("*.part"))


def test_something_is_wrong(capsys):
    script = Script(replies(t6_multi_turn=WRONG["t6_multi_turn"][0][0], t10_stop_word=SKIPPED["t10_stop_word"][0][0],
                            d08_image_url_blocked=WRONG["d08_image_url_blocked"][0][0]))
    assert run(script) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "50 of 51 scored checks passed, 1 skipped (out of the count); long output: PASS"
    told = {line.split()[1]: line for line in lines[1:-1]}
    assert told["t6_multi_turn"].startswith("FAIL") and "'BLUE_42' is not in the content" in told["t6_multi_turn"]
    assert told["t10_stop_word"].startswith("SKIP") and told["d08_image_url_blocked"].startswith("FAIL")


def test_what_is_not_scored_and_what_is_skipped_fails_nothing(capsys):
    others = {"t16b_missing_content": WRONG["t16b_missing_content"][0][0],
              "t10_stop_word": SKIPPED["t10_stop_word"][0][0]}
    assert run(Script(replies(**others))) == 0
    assert run(Script(replies(**others)), "--no-skip") == 1
    assert "51 of 51 scored checks passed, 1 skipped" in capsys.readouterr().out


def test_a_module_that_fails(capsys):
    assert run(Script([*replies()[:-1], streams(*words(3), usage={"completion_tokens": 8})])) == 1
    assert "52 of 52 scored checks passed; long output: FAIL" in capsys.readouterr().out


def test_only_some(capsys):
    script = Script([RIGHT["t12_chinese"][0][0], RIGHT["t12_emoji"][0][0], RIGHT["t16c_empty_messages"][0][0]])
    assert run(script, "--only", "t16c_*", "--only", "t12_[ce]*") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:-1]] == ["t12_chinese", "t12_emoji", "t16c_empty_messages"]
    assert lines[-1] == "3 of 3 scored checks passed"
    assert run(Script(replies()), "--no-long-output") == 0
    assert "long" not in capsys.readouterr().out.splitlines()[-1]


def test_going_on(capsys, tmp_path):
    report = str(tmp_path / "report.json")
    with served(lambda asked: (first if len(first.chats) < 60 else second)(asked)) as base:
        arguments = ["--base-url", base, "--report", report, "--no-long-output"]
        first = Script(replies(t6_multi_turn=WRONG["t6_multi_turn"][0][0]))
        second = Script(RIGHT["t6_multi_turn"][0])
        assert main(arguments) == 1 and len(first.chats) == 2 + 58
        assert main([*arguments, "--resume"]) == 0
        assert [asked.body["messages"][-1]["content"] for asked in second.chats] == [
            "2+2=?", "2+2=?", "What is the secret word?"], "what passed is not asked again"
        assert "52 of 52" in capsys.readouterr().out.splitlines()[-1]
        assert json.loads(Path(report).read_text(encoding="utf-8"))["totals"]["PASS"] == 52
        assert main([*arguments, "--resume", "--timeout", "5"]) == 2
        assert "another timeout_s" in capsys.readouterr().err


def test_an_interrupted_run_keeps_what_passed_before_it(tmp_path, monkeypatch):
    """Whatever has not had its turn."""
    report = tmp_path / "report.json"
    wrong = Script(replies(t6_multi_turn=WRONG["t6_multi_turn"][0][0]))
    with served(lambda asked: script(asked)) as base:
        script = wrong
        arguments = ["--base-url", base, "--report", str(report), "--concurrency", "1", "--long-tokens", "10"]
        assert main(arguments) == 1
        before = json.loads(report.read_text(encoding="utf-8"))
        script = Script([])
        monkeypatch.setattr(under_test.Harness, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main([*arguments, "--resume"]) == 130
    after = json.loads(report.read_text(encoding="utf-8"))
    assert after["totals"] == {**before["totals"], "FAIL": 0} and after["totals"]["long_output"] == "PASS", after


def test_a_report_that_cannot_be_gone_on_from_or_written(capsys, tmp_path):
    report = tmp_path / "report.json"
    for text in ("{", "[]", '{"checks": 3}', json.dumps({"checks": [3]})):
        report.write_text(text, encoding="utf-8")
        assert run(Script([]), "--resume", "--report", str(report)) == 2
        assert f"{report} is no report of this program" in capsys.readouterr().err, text
    nothing = Script([])
    assert run(nothing, "--report", str(report / "x")) == 2
    assert "Error: [Errno" in capsys.readouterr().err and len(nothing.chats) == 2, "told of before the checks"


def test_what_a_server_says_does_not_reach_the_terminal_raw(capsys):
    refusal = Reply(500, "\x1b[31mred\x1b]0;title\x07 北京", "text/plain")
    assert run(Script([refusal]), "--only", "d01*") == 1
    assert "status 500: \ufffd[31mred\ufffd]0;title\ufffd 北京" in capsys.readouterr().out


def test_the_record_of_a_report(tmp_path):
    found = {"base_url": "http://10.1.2.3", "model": "llm", "version": {"version": "0.6.3"}, "totals": {"PASS": 1},
             "checks": [{"id": "t1"}]}
    one, other = (json.loads(keep(kind, "b1", "serve /some/where/twin --port 1", {**found, "version": said}, tmp_path)
                             .read_text(encoding="utf-8")) for kind, said in (("ours", found["version"]),
                                                                              ("llama", None)))
    assert (one["kind"], one["server"], one["version"], other["version"]) == ("acceptance", "ours", "0.6.3", "b1")
    assert one["server_command"] == "serve twin --port 1" and one["checks"] == found["checks"]
    assert "10.1.2.3" not in json.dumps(one)


def test_no_server_and_another_model(capsys):
    assert main(["--base-url", "http://127.0.0.1:9"]) == 2
    assert "ConnectError" in capsys.readouterr().err
    assert run(Script([]), "--model", "other") == 2
    assert "it serves llm, not other (--model)" in capsys.readouterr().err
    assert main(["--base-url", "http://[::"]) == 2
    assert "InvalidURL" in capsys.readouterr().err


@pytest.mark.parametrize("reply", [
    Reply(200, "<html>", "text/html"), Reply(200, ["llm"]), Reply(200, {"data": ["llm"]}), Reply(200, {})])
def test_no_list_of_models(capsys, reply):
    with served(lambda _: reply) as base:
        assert main(["--base-url", base]) == 2
    told = capsys.readouterr().err
    assert told == f"acceptance: {base}: ValueError: /v1/models lists no models: {reply.raw.decode()!r}\n"


@pytest.mark.parametrize(("arguments", "why"), [
    ((), "--base-url"), (("--base-url", "http://x", "--only", "t99*"), "no check matches t99*"),
    (("--base-url", "http://x", "--resume"), "--resume needs --report"),
    (("--base-url", "http://x", "--report", "."), "--report . is a folder"),
    (("--base-url", "http://x", "--timeout", "nan"), "must be above 0"),
    (("--base-url", "http://x", "--concurrency", "0"), "must be above 0")])
def test_wrong_use(capsys, arguments, why):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2 and why in capsys.readouterr().err


def test_a_started_server_is_the_one_that_is_judged(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve", "twin", "--base-url", "http://other"])
    with pytest.raises(SystemExit) as ended:
        serve.main()
    assert ended.value.code == 2 and "--base-url is of the server that this starts" in capsys.readouterr().err


def test_help():
    done = subprocess.run([sys.executable, "-m", "tests.acceptance", "--help"], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0 and "python -m tests.acceptance --base-url" in done.stdout, done
    for option in ("--model", "--only", "--no-progress", "--report", "--resume", "--timeout", "--keep"):
        assert option in done.stdout, option
