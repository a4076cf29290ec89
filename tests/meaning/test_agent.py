"""An agent with real tools in a scratch folder: the model decides everything; the folder is looked at afterwards."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.meaning.floors import FILES
from tests.meaning.folder import BYSTANDER, Folder, Task, draw
from tests.meaning.served import LOST, Said, Twin, reusable

KINDS = ("read", "write", "copy", "list", "delete")
EACH, AT_ONCE = 2, 5
# The longest task takes three requests; who needs more than this goes in circles.
STEPS = 6


def run(twin: Twin, task: Task, thinking: bool, root: Path) -> tuple[bool, str]:
    """Whether it ended with what was asked for, and what happened."""
    folder = Folder(root, task)
    history: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
    log = [task.question]
    before: Said | None = None
    for _ in range(STEPS):
        (said,) = twin.ask(history, thinking, tools=task.tools, cache_salt=str(root))
        known = reusable(before, said.prompt)
        assert known - LOST <= said.cached < len(said.prompt), f"{said.cached} cached of {known} that were known"
        before = said
        history.append(said.message())
        if said.finish != "tool_calls":
            log.append(said.content)
            good = said.finish == "stop" and folder.content() == task.after and all(
                text in said.content for text in task.said)
            return good, f"{task.kind}, {'right' if good else 'wrong'}: {' | '.join(log)}"
        for call in said.calls:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            result = folder.carry_out(name, arguments)
            log.append(f"{name} {arguments} -> {result}")
            history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return False, f"{task.kind}, no end: {' | '.join(log)}"


def test_tasks_with_files(plain: Twin, tmp_path: Path):
    rng = random.Random("files")
    tasks = [(draw(rng, kind, bool(turn)), bool(turn)) for turn in range(EACH) for kind in KINDS]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = list(pool.map(lambda numbered: run(plain, *numbered[1], tmp_path / str(numbered[0])), enumerate(tasks)))
    shown = "\n".join(story for _, story in done)
    right = sum(good for good, _ in done)
    print(f"{right} of {len(done)}\n{shown}")
    assert right >= FILES * len(done), shown
    assert len({story for _, story in done}) == len(done)


@pytest.fixture
def task() -> Task:
    return Task("copy", "", [], ("read", "write", "list", "delete"), {"a/b.txt": "one", BYSTANDER: "x"}, {})


def test_the_tools_are_real(task, tmp_path):
    folder = Folder(tmp_path / "in", task)
    assert folder.carry_out("read", {"path": "a/b.txt"}) == "one"
    assert folder.carry_out("write", {"path": "c.md", "content": "two"}) == "ok"
    assert folder.carry_out("list", {"folder": "."}) == "a\nc.md\nother"
    assert folder.carry_out("delete", {"path": "a/b.txt"}) == "ok"
    assert folder.content() == {"c.md": "two", BYSTANDER: "x"}


@pytest.mark.parametrize(("name", "arguments"), [
    ("write", {"path": "../out.txt", "content": "x"}), ("write", {"path": "/out.txt", "content": "x"}),
    ("read", {"path": "nothing"}), ("read", {}), ("write", {"path": "a", "content": "x"}), ("write", {"path": 3}),
    ("list", {"folder": "a/b.txt"}), ("open", {})])
def test_bad_calls_are_told_and_change_nothing(task, tmp_path, name, arguments):
    folder = Folder(tmp_path / "in", task)
    assert folder.carry_out(name, arguments).startswith("error: ")
    assert folder.content() == task.before
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_tasks_are_what_they_say():
    rng = random.Random("all")
    for kind in KINDS * 4:
        task = draw(rng, kind, rng.random() < 0.5)
        changed = set(task.before.items()) ^ set(task.after.items())
        assert len(changed) == (kind in ("write", "copy", "delete")), task
        assert bool(task.said) == (kind in ("read", "list")) and len(task.tools) == len(set(task.names)) == 4
