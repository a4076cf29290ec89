"""`make bench` whole, with the twin and as little as it can do: the record and the page that it leaves."""
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TWIN = ROOT / "tests" / "twin" / "checkpoint"


def bench(work, *words, **environment):
    """What it did."""
    little = {"REQUESTS": "4", "CAP": "1K", "TOKENS": "8", "CONCURRENCY": "2"}
    return subprocess.run(["bash", str(ROOT / "worklogs" / "small_bench.sh"), *map(str, words)], text=True,
                          capture_output=True, cwd=work.parent, env={
                              **os.environ, "PYTHON": sys.executable, "WORK": str(work), **little, **environment})


def test_a_bench_leaves_a_record_and_a_page(tmp_path):
    work, out = tmp_path / "work", tmp_path / "records"
    out.mkdir()
    (out / "formal-perf-ours.partial").write_text("of a run that was killed")
    found = bench(work, TWIN, "--max-num-seqs", "4", OUT=str(out))
    print(found.stdout, found.stderr)
    assert found.returncode == 0
    [path] = out.iterdir()
    record = json.loads(path.read_text())
    assert json.loads((work / "record.json").read_text()) == record
    [dataset] = work.glob("synthetic_official_4_s3_cap1k.jsonl")
    lines = list(map(json.loads, dataset.read_text().splitlines()))
    assert (record["mode"], record["concurrency"], record["sittings"], record["ended_early"]) == ("closed", 2, 1, None)
    assert record["server"]["kind"] == "ours" and record["server"]["command"] == (
        "requirements/serve.sh checkpoint --max-num-seqs 4")
    assert len(record["manifest"]) >= 12 and record["others_cores"] is not None
    # Our server counts prompts as the dataset does, answers with as many tokens as it is told to, and keeps prefixes.
    assert record["tokenizer"] == {"compared": 4, "disagree": 0} and record["summary"]["classes"] == {"ok": 4}
    for line, sample in zip(lines, record["samples"], strict=True):
        assert sample["prompt_tokens"] == line["expected_prompt_tokens"] <= 1024
        assert sample["completion_tokens"] == min(8, line["answer_tokens"])
        assert sample["sent_s"] < sample["first_s"] <= sample["last_s"] <= record["wall_s"]
    assert 0 <= record["summary"]["hit_rate"] <= record["summary"]["hit_rate_theoretical"]
    assert len(record["summary"]["gates"]) == 6 and all(gate["met"] is not None for gate in record["summary"]["gates"])
    page = (work / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "TTFT by length of the prompt" in page and "<script" not in page
    assert f"{record['wall_s']:.2f} s" in page and record["utc"] in page
    assert "NOT MET" in found.stdout and f"kept as {path.name}" in found.stdout
    port = int((work / "server.log").read_text().partition("Ready: llm at http://127.0.0.1:")[2].split()[0])
    assert not any(f"127.0.0.1:{port}" in line for line in listening()), "the server goes on"


def listening():
    """Ends of sockets that listen, as HOST:PORT."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, _, state = line.split()[1:4]
        if state == "0A":
            host, port = local.split(":")
            yield f"{'.'.join(str(byte) for byte in bytes.fromhex(host)[::-1])}:{int(port, 16)}"


@pytest.mark.parametrize(("words", "said"), [([], "bench: usage: small_bench.sh MODEL"),
                                             (["nowhere"], "nowhere: no tokenizer.json")])
def test_what_is_missing_is_said(tmp_path, words, said):
    found = bench(tmp_path / "work", *words)
    assert found.returncode == 1 and said in found.stderr.strip().splitlines()[-1]


def test_two_at_once_do_not_spoil_each_other(tmp_path):
    """The second would remove the first one's dataset and unfinished run."""
    work, out = tmp_path / "work", tmp_path / "out"
    for folder, name, said in ((work, "lock", "another bench runs in"),
                               (out, "formal-perf-ours.partial", "another run writes")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("kept")
        with (folder / name).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (work / "synthetic_x.jsonl").write_text("kept")
            found = bench(work, TWIN, OUT=str(out))
        assert found.returncode == 1 and said in found.stderr
        assert (work / "synthetic_x.jsonl").exists()
    assert (out / "formal-perf-ours.partial").read_text() == "kept"
