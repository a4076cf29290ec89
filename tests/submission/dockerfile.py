"""A Dockerfile as a list of instructions, and the files that .dockerignore lets through to it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KNOWN = frozenset(
    ["FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "SHELL", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"]
)
_LINE = re.compile(r"(?P<word>[A-Za-z]+)\s+(?P<rest>.*)", re.DOTALL)
_WORD = re.compile(r"(\w+)=(?:\"([^\"]*)\"|(\S*))")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name in capitals, and the rest with its continuation lines joined."""

    name: str
    rest: str

    def words(self) -> list[str]:
        """The words of a plain or a JSON list."""
        return json.loads(self.rest) if self.rest.startswith("[") else self.rest.split()

    def pairs(self) -> dict[str, str]:
        """``NAME=value`` words. Raises ValueError for anything else, such as the old form without ``=``."""
        found = {name: quoted or plain for name, quoted, plain in _WORD.findall(self.rest)}
        if _WORD.sub("", self.rest).strip():
            raise ValueError(f"{self.name} {self.rest}: not a list of NAME=value")
        return found


def parse(text: str) -> list[Instruction]:
    """Raises ValueError for an instruction, or a form of one, that this reader does not know."""
    found = []
    for line in _logical_lines(text):
        match = _LINE.fullmatch(line)
        if not match or match["word"] not in KNOWN:
            raise ValueError(f"unknown instruction: {line}")
        if "<<" in match["rest"]:
            raise ValueError(f"here-documents keep the line endings of the checkout, so none is used: {line}")
        found.append(Instruction(match["word"], match["rest"].strip()))
    return found


def _logical_lines(text: str) -> Iterator[str]:
    """Lines without comments and empty ones; what ends in a backslash goes on. A CR at the end counts as in Docker:
    not at all."""
    whole = ""
    for line in text.split("\n"):
        line = line.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole += line.removesuffix("\\")
        if not line.endswith("\\"):
            yield whole.strip()
            whole = ""
    if whole:
        raise ValueError(f"the last line goes on: {whole}")


def delivered(context: Path) -> list[str]:
    """Every file below context that ``COPY .`` delivers, relative to it, sorted."""
    rules = _rules((context / ".dockerignore").read_text(encoding="utf-8"))
    exceptions = any(keep for keep, _ in rules)
    found = []
    for folder, folders, names in os.walk(context):
        here = Path(folder).relative_to(context)
        if not exceptions:
            folders[:] = [name for name in folders if not _ignored((here / name).as_posix(), rules)]
        found += [path for path in ((here / name).as_posix() for name in names) if not _ignored(path, rules)]
    return sorted(found)


def _rules(text: str) -> list[tuple[bool, re.Pattern[str]]]:
    """(whether it brings files back, what it fits)."""
    lines = [line.strip() for line in text.splitlines()]
    return [(line.startswith("!"), _pattern(line.lstrip("!").strip("/"))) for line in lines if line and line[0] != "#"]


def _pattern(rule: str) -> re.Pattern[str]:
    """Docker's wildcards: ``*`` and ``?`` stay within one name, ``**`` is any number of folders."""
    if "[" in rule or "\\" in rule:
        raise ValueError(f".dockerignore: {rule}: a form that this reader does not know")
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(parts.get(part) or re.escape(part) for part in re.split(r"(\*\*/|\*\*|\*|\?)", rule)))


def _ignored(path: str, rules: list[tuple[bool, re.Pattern[str]]]) -> bool:
    """The last rule that fits the path or a folder above it decides."""
    parts = path.split("/")
    above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    verdict = False
    for keep, pattern in rules:
        if any(pattern.fullmatch(name) for name in above):
            verdict = not keep
    return verdict
