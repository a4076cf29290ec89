"""Datasets: their lengths, reuse and oddities, that they are those of one seed, and that no prefix is an accident."""
import json

import pytest

from tests.helpers.small_demo import small_demo
from worklogs import generate_official_like_dataset as generate
from worklogs.generate_official_like_dataset import trace


def made(folder, *words):
    """(exit status, manifest, dataset) with the small demo's tokenizer."""
    folder.mkdir(exist_ok=True)
    status = generate.main(["--tokenizer", str(small_demo()), "--out", str(folder), "--no-progress", *words])
    paths = list(folder.glob("*.jsonl"))
    if status or not paths:
        return status, None, None
    return status, json.loads(trace.manifest_path(paths[0]).read_text()), trace.read(paths[0])


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    return made(tmp_path_factory.mktemp("official") / "d", "--requests", "40", "--seed", "5", "--cap", "4K", "--bucket",
                "1K:1:0.3", "--bucket", "2K:2:0.8", "--bucket", "4K:2:0.6", "--pictures", "0.1", "--multi-system",
                "0.1", "--oddities", "0.5")


def common(one, other):
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)))


def test_a_cumulative_dataset_extends_its_last_request(tmp_path):
    status, manifest, found = made(tmp_path / "d", "--requests", "8", "--seed", "3", "--cap", "4K", "--cumulative")
    assert manifest["settings"]["pictures"] == manifest["settings"]["multi_system"] == 0
    assert status == 0 and found.name == "synthetic_cumulative_8_s3_cap4k" and manifest["name"] == found.name + ".jsonl"
    for before, item in zip(found.items, found.items[1:], strict=False):
        last = before.body["messages"]
        assert item.body["messages"][:len(last)] == last and item.turn == before.turn + 1
        assert item.theoretical_reuse > 0.8 * before.expected_prompt_tokens
    print([(item.expected_prompt_tokens, item.theoretical_reuse) for item in found.items])
    assert 4096 - generate.SHORT_BY <= found.items[-1].expected_prompt_tokens <= 4096
    assert len({item.conversation for item in found.items}) == 1
    assert 0.7 < manifest["reuse"] < 0.78       # (n - 1) / (n + 1), less what the template rewrites.


def test_lengths_reuse_and_shares_are_as_wanted(official):
    status, manifest, found = official
    print(json.dumps({**manifest, "per_request": 0}, indent=1))
    assert status == 0 and [row["requests"] for row in manifest["buckets"]] == [8, 16, 16]
    assert manifest["longest"] <= 4096
    # Of so few and so short prompts not all that is wanted can be had.
    assert abs(manifest["buckets"][1]["reuse"] - 0.8) < 0.2 and abs(manifest["buckets"][2]["reuse"] - 0.6) < 0.15
    shares = manifest["shares"]
    assert abs(shares["tools"] - generate.TOOLS) < 0.1 and shares["pictures"] == 0.1
    assert shares["multi_system"] == 0.1
    assert sum(row["expected_prompt_tokens"] for row in manifest["per_request"]) == manifest["tokens"]


def test_expected_tokens_and_reuse_are_those_of_the_server(official):
    """Rendered anew, and compared pair by pair instead of by sorting."""
    _, manifest, found = official
    served = generate.Served(small_demo())
    ids = [served.render(item.body).ids for item in found.items]
    served.close()
    for index, item in enumerate(found.items):
        assert item.expected_prompt_tokens == len(ids[index])
        shared = max((common(ids[index], ids[before]) for before in range(index)), default=0)
        assert item.theoretical_reuse == min(shared, len(ids[index]) - 1), index
    proof = manifest["no_accidental_prefixes"]
    anew = [item for item, row in zip(found.items, manifest["per_request"], strict=True) if row["parent"] is None]
    assert proof["begin_anew"] == len(anew) >= 5
    # What the template writes before the first tool's name, or the system's text.
    assert max(item.theoretical_reuse for item in anew) == proof["most_shared_by_those"] < 64
    assert proof["most_beyond_plan"] <= generate.SLACK


def test_the_oddities_are_there_and_systems_are_cleaned(official):
    _, _, found = official
    bodies = [item.body for item in found.items]
    messages = [message for body in bodies for message in body["messages"]]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    assert any("max_completion_tokens" in body for body in bodies) and any("max_tokens" in body for body in bodies)
    assert any(message["role"] == "assistant" and message["content"] is None for message in messages)
    assert {type(call["function"]["arguments"]) for call in calls} == {str, dict} and any("index" in call
                                                                                          for call in calls)
    assert any(isinstance(message["content"], list) for message in messages)
    assert all(message["role"] != "developer" for message in messages)
    for body in bodies:
        assert [message["role"] for message in body["messages"]].count("system") == 1
        assert body["messages"][-1]["role"] in ("user", "tool")
        wanted = [call["id"] for message in body["messages"] for call in message.get("tool_calls") or ()]
        assert wanted == [message["tool_call_id"] for message in body["messages"] if message["role"] == "tool"]


def test_raw_systems_are_left(tmp_path):
    _, _, found = made(tmp_path / "d", "--requests", "6", "--cap", "1K", "--multi-system", "1", "--systems", "raw")
    for item in found.items:
        assert sum(message["role"] in ("system", "developer") for message in item.body["messages"]) >= 2


def test_one_seed_makes_one_dataset_also_when_it_is_resumed(tmp_path, monkeypatch, capsys):
    words = ("--requests", "6", "--seed", "9", "--cap", "1K", "--rate", "2")
    _, manifest, found = made(tmp_path / "a", *words)
    assert [item.arrival_s for item in found.items] == sorted(item.arrival_s for item in found.items)
    _, other, _ = made(tmp_path / "b", "--requests", "6", "--seed", "10", "--cap", "1K")
    assert other["sha256"] != manifest["sha256"]
    one, steps = generate.Generator.next, []

    def stop_at_the_fourth(self):
        steps.append(0)
        if len(steps) == 4:
            raise OSError("the disk is full")
        one(self)

    monkeypatch.setattr(generate.Generator, "next", stop_at_the_fourth)
    assert made(tmp_path / "c", *words)[0] == 1 and "the disk is full" in capsys.readouterr().err
    monkeypatch.setattr(generate.Generator, "next", one)
    (partial, ) = (tmp_path / "c").glob("*.partial")
    partial.write_text(partial.read_text() + '{"length": 12')     # Killed while it wrote.
    assert made(tmp_path / "c", *words, "--seed", "8", "--resume")[0] == 1
    _, resumed, _ = made(tmp_path / "c", *words, "--resume")
    assert resumed == manifest and not partial.exists()


def test_an_interrupted_dataset_is_gone_on_with_by_one_process_alone(tmp_path, monkeypatch, capsys):
    words, one = ("--requests", "3", "--cap", "1K"), generate.Generator.next

    def interrupted(self):
        if self.made:
            assert made(tmp_path / "d", *words, "--resume")[0] == 1
            raise KeyboardInterrupt
        one(self)

    monkeypatch.setattr(generate.Generator, "next", interrupted)
    assert made(tmp_path / "d", *words)[0] == generate.INTERRUPTED == 130
    first, second = capsys.readouterr().err.strip().splitlines()
    assert "goes on now" in first and second.endswith("interrupted; --resume goes on if a .partial file is there")
    monkeypatch.setattr(generate.Generator, "next", one)
    [partial] = (tmp_path / "d").glob("*.partial")
    key, kept = partial.read_text().splitlines()
    for text in (f'{key}\n{{"length": 3}}\n', f"{key}\n3\n", "3\n"):
        partial.write_text(text)
        assert made(tmp_path / "d", *words, "--resume")[0] == 1
        error = capsys.readouterr().err.strip()
        assert "make it without --resume" in error and "\n" not in error
    partial.write_text(f"{key}\n{kept}\n")
    assert made(tmp_path / "d", *words, "--resume")[0] == 0
    assert str(tmp_path / "d" / "synthetic_official_3_s0_cap1k.jsonl") in capsys.readouterr().out


@pytest.mark.parametrize(("name", "text", "words"), [
    ("tokenizer.json", "{", "its tokenizer cannot be read"), ("tokenizer.json", "{}", "its tokenizer cannot be read"),
    ("config.json", "[]", "config.json: is no configuration"), ("config.json", "{", "config.json does not parse"),
    ("config.json", '{"vision_config": 3}', "config.json: is no configuration")])
def test_a_folder_that_is_no_checkpoints_is_one_line(tmp_path, capsys, name, text, words):
    for path in small_demo().iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_text(text)
    assert made(tmp_path / "d", "--tokenizer", str(tmp_path))[0] == 1
    error = capsys.readouterr().err.strip()
    assert words in error and error.startswith("generate_official_like_dataset: ") and "\n" not in error


def test_an_accidental_prefix_is_found(tmp_path, monkeypatch, capsys):
    """Every tag is the same, so conversations that begin anew share what they should not."""
    monkeypatch.setattr(generate.Texts, "tag", lambda self: self.tags.append("00000007") or self.tags[-1])
    monkeypatch.setattr(generate.Texts, "words", lambda self, count: "all the same " * max(1, count // 3))
    status, _, _ = made(tmp_path / "d", "--requests", "3", "--cap", "1K", "--tools", "0", "--pictures", "0")
    assert status == 1 and "accidental prefix" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "found"), [
    (["--tokenizer", "nowhere"], "nowhere: no tokenizer.json"), (["--resume"], "nothing to resume"),
    (["--out", __file__], "--out ")])
def test_bad_input_is_one_line(words, found, tmp_path, capsys):
    assert made(tmp_path, *words)[0] == 1
    error = capsys.readouterr().err.strip()
    assert found in error and "\n" not in error


@pytest.mark.parametrize("words", [["--cap", "many"], ["--cap", "10"], ["--bucket", "8K:1"], ["--tools", "2"],
                                   ["--bucket", "8K:1:0.5", "--bucket", "4K:1:0.5"], ["--requests", "0"],
                                   ["--bucket", "8K:inf:0.5"], ["--rate", "inf"], ["--rate", "nan"],
                                   ["--pictures", "0.1", "--cumulative"]])
def test_a_bad_command_line_is_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        generate.parse(["--tokenizer", "x", *words])
    assert ended.value.code == 2 and words[0] in capsys.readouterr().err
