"""Tasks with files for an agent, held-out ones of tests/twin, and the tools that carry out its calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import toolbox
from chats import TRAIN, Chat, expand, split_of, too_near
from words import code, word

BYSTANDER = "other/keep.txt"


@dataclass
class Task:
    """before, after: path -> text, of the whole folder. said: what the last answer must hold. names: what the tools
    that read, write, list and delete are called this time."""

    kind: str
    question: str
    tools: list[dict[str, Any]]
    names: tuple[str, str, str, str]
    before: dict[str, str]
    after: dict[str, str]
    said: list[str] = field(default_factory=list)


def draw(rng: random.Random, kind: str, thinking: bool) -> Task:
    """kind: read, write, copy, list or delete."""
    while True:
        task, wording = _task(rng, kind)
        chat = Chat("file steps", wording, [{"role": "user", "content": task.question}], "", "" if thinking else None,
                    [], task.tools)
        if split_of(chat) != TRAIN and not too_near(chat) and BYSTANDER in task.after:
            return task


def _task(rng: random.Random, kind: str) -> tuple[Task, str]:
    names = [rng.choice(tool_names) for tool_names, _, _ in toolbox.FILE_TOOLS]
    tools = [toolbox.tool(rng, name, about, first)
             for name, (_, about, first) in zip(names, toolbox.FILE_TOOLS, strict=True)]
    rng.shuffle(tools)
    there, new, folder = toolbox.path(rng), toolbox.path(rng), word(rng).lower()
    content = " ".join(rng.choice((word, code))(rng) for _ in range(rng.randint(1, 4)))
    wording = expand(rng, rng.choice(toolbox.FILE_ASKS[kind]))
    question = wording
    for mark, value in (("{p}", there), ("{q}", new), ("{d}", folder), ("{x}", content)):
        question = question.replace(mark, value)
    listed = {f"{folder}/{toolbox.path(rng).split('/')[-1]}": code(rng) for _ in range(rng.randint(1, 4))}
    others = {BYSTANDER: code(rng)}
    before = {**others, **({} if kind == "write" else listed if kind == "list" else {there: content})}
    after = {**before, **{"write": {there: content}, "copy": {new: content}}.get(kind, {})}
    if kind == "delete":
        after.pop(there)
    said = {"read": [content], "list": [path.split("/")[-1] for path in listed]}.get(kind, [])
    return Task(kind, question, tools, tuple(names), before, after, said), wording  # type: ignore[arg-type]


class Folder:
    """A scratch folder. `carry_out` does what a call says, whatever it says, and nothing outside the folder."""

    def __init__(self, root: Path, task: Task) -> None:
        self.root = root.resolve()
        does: tuple[Callable[[dict[str, Any]], str], ...] = (self._read, self._write, self._list, self._delete)
        self.does = dict(zip(task.names, does, strict=True))
        for path, text in task.before.items():
            self._write({"path": path, "content": text})

    def carry_out(self, name: str, arguments: dict[str, Any]) -> str:
        """What the tool says; an error is said to the model, which may try again."""
        if name not in self.does:
            return f"error: there is no tool {name}"
        try:
            return self.does[name](arguments)
        except (OSError, KeyError, TypeError, ValueError) as error:
            return f"error: {type(error).__name__}"

    def content(self) -> dict[str, str]:
        return {str(path.relative_to(self.root)): path.read_text(encoding="utf-8")
                for path in sorted(self.root.rglob("*")) if path.is_file()}

    def _at(self, path: str) -> Path:
        place = (self.root / path).resolve()
        place.relative_to(self.root)        # ValueError where it is outside.
        return place

    def _read(self, arguments: dict[str, Any]) -> str:
        return self._at(arguments["path"]).read_text(encoding="utf-8")

    def _write(self, arguments: dict[str, Any]) -> str:
        place = self._at(arguments["path"])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(arguments["content"], encoding="utf-8")
        return "ok"

    def _list(self, arguments: dict[str, Any]) -> str:
        return "\n".join(sorted(path.name for path in self._at(arguments["folder"]).iterdir()))

    def _delete(self, arguments: dict[str, Any]) -> str:
        self._at(arguments["path"]).unlink()
        return "ok"
