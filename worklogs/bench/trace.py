"""A dataset: one request per line of a .jsonl file, in the order in which they are sent.

A line is an object:
  body                     of POST /v1/chat/completions; sent as it stands, but for what the bench says it replaces
  conversation, turn       which requests belong together (text), and the how manieth this one is (from 0)
  expected_prompt_tokens   after rendering with the served template, by the tokenizer that made the dataset, or null
  theoretical_reuse        tokens that some earlier request's prompt began with, or null; not more than the prompt has
  answer_tokens            how long the answer should be where the bench forces lengths, or null
  arrival_s                seconds from the run's start (open loop), or null
All but body are optional. An object with `messages` and without `body` is taken for a body.

Beside NAME.jsonl there may be NAME.manifest.json; then the file must have the SHA-256 that it says.
"""
import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any


class DatasetError(Exception):
    """A dataset that cannot be used; one line that says where and why."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One request; the fields are those of a line."""

    index: int
    body: dict[str, Any]
    conversation: str
    turn: int = 0
    expected_prompt_tokens: int | None = None
    theoretical_reuse: int | None = None
    answer_tokens: int | None = None
    arrival_s: float | None = None

    def line(self) -> str:
        """The line, without its end."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "index"}
        body = found.pop("body")
        return json.dumps({**found, "body": body}, ensure_ascii=False, separators=(",", ":"))


@dataclasses.dataclass(frozen=True)
class Dataset:
    """name: the file's, without its ending. manifest: {} where there is none."""

    name: str
    sha256: str
    items: tuple[Item, ...]
    manifest: dict[str, Any]


def read(path: Path, limit: int | None = None) -> Dataset:
    """limit: only the first so many requests.

    Raises:
        DatasetError: not there, a line that is no request (with its number), or not what its manifest says.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from error
    digest = hashlib.sha256(data).hexdigest()
    manifest = _manifest(manifest_path(path))
    if manifest and manifest.get("sha256") != digest:
        raise DatasetError(f"{path}: is not the file that {manifest_path(path).name} describes (another SHA-256); "
                           "make it again, or remove the manifest")
    items: list[Item] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            items.append(_item(line, len(items), f"{path}: line {number}"))
    if not items:
        raise DatasetError(f"{path}: holds no request")
    return Dataset(path.name.removesuffix(".jsonl"), digest, tuple(items[:limit]), manifest)


def write(path: Path, items: list[Item]) -> str:
    """Writes the file, and returns its SHA-256."""
    data = "".join(item.line() + "\n" for item in items).encode()
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def manifest_path(path: Path) -> Path:
    """Where the manifest of a dataset is."""
    return path.with_name(path.name.removesuffix(".jsonl") + ".manifest.json")


def _manifest(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: does not parse: {error}") from error
    if not isinstance(found, dict):
        raise DatasetError(f"{path}: is no JSON object")
    return found


def no_number(word: str) -> Any:
    """For json.loads, which takes NaN and Infinity otherwise, as no server does.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{word} is no JSON")


def _item(line: bytes, index: int, where: str) -> Item:
    try:
        found = json.loads(line, parse_constant=no_number)
    except ValueError as error:
        raise DatasetError(f"{where}: does not parse: {error}") from error
    if not isinstance(found, dict):
        raise DatasetError(f"{where}: is no JSON object")
    if "body" not in found and "messages" in found:
        found = {"body": found}
    body = found.get("body")
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise DatasetError(f"{where}: has no body with a list of messages")
    conversation = found.get("conversation", str(index))
    if not isinstance(conversation, str):
        raise DatasetError(f"{where}: conversation is {conversation!r:.40}, not text")
    numbers = {name: _count(found.get(name), f"{where}: {name}")
               for name in ("turn", "expected_prompt_tokens", "theoretical_reuse", "answer_tokens")}
    arrival = found.get("arrival_s")
    if arrival is not None and (isinstance(arrival, bool) or not isinstance(arrival, int | float)
                                or not 0 <= arrival < math.inf):
        raise DatasetError(f"{where}: arrival_s is {arrival!r:.40}, not a number of seconds")
    prompt, reused = numbers["expected_prompt_tokens"], numbers["theoretical_reuse"]
    if prompt is not None and reused is not None and reused > prompt:
        raise DatasetError(f"{where}: theoretical_reuse is {reused}, of {prompt} expected_prompt_tokens")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise DatasetError(f"{where}: stream_options is {body['stream_options']!r:.40}, not an object")
    return Item(index, body, conversation, numbers["turn"] or 0, numbers["expected_prompt_tokens"],
                numbers["theoretical_reuse"], numbers["answer_tokens"], arrival)


def _count(value: Any, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DatasetError(f"{where} is {value!r:.40}, not a count")
    return value
