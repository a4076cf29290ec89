"""Texts, tools and messages of synthetic agent conversations. What is new begins with a tag that nothing else has."""
import base64
import io
import json
import random
from collections.abc import Iterator
from typing import Any

from PIL import Image

from .words import WORDS

Message = dict[str, Any]

VERBS = ("read", "write", "search", "list", "run", "open", "fetch", "edit", "check", "send")
PARTS = ("file", "folder", "page", "table", "test", "branch", "note", "mail", "sheet", "log")
# Of what a message costs beside its text, in tokens: enough to plan with, the rendered prompt decides.
OVERHEAD = 6


class Texts:
    """Makes texts from one seed. tags: all that were given out. longest: words of a message at most."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.tags: list[str] = []
        self.longest = 20_000

    def tag(self) -> str:
        """Eight hexadecimal digits, new every time."""
        self.tags.append(f"{self.chance.getrandbits(32):08x}")
        return self.tags[-1]

    def words(self, count: int) -> str:
        """`count` words, in sentences."""
        found = []
        while count > 0:
            length = min(count, self.chance.randint(6, 16))
            found.append(" ".join(self.chance.choices(WORDS, k=length)).capitalize() + ".")
            count -= length
        return " ".join(found)

    def code(self, count: int) -> str:
        """Lines as a tool shows a file, about `count` words long."""
        lines = []
        number = self.chance.randint(1, 400)
        while count > 0:
            left, right, name = self.chance.choices(WORDS, k=3)
            lines.append(f"{number:5d}\t{'    ' * self.chance.randint(0, 3)}{left}_{right} = {name}({right}, "
                         f"{self.chance.randint(0, 999)})")
            number += 1
            count -= 14
        return "\n".join(lines)

    def tool(self, tag: str, size: int) -> dict[str, Any]:
        """A definition of about `size` words; its parameters in one of the forms that clients send, some of them
        broken."""
        chance = self.chance
        name = f"{chance.choice(VERBS)}_{chance.choice(PARTS)}_{tag}"
        properties: dict[str, Any] = {}
        for word in chance.sample(WORDS, chance.randint(1, 4)):
            # The first is text, so that every call has a tag.
            kind = chance.choice(("string", "integer", "boolean")) if properties else "string"
            properties[word] = {"type": kind, "description": self.words(max(4, size // 8))}
        parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": list(properties)[:1]}
        form = chance.randrange(8)
        if form == 0:
            properties["options"] = {"anyOf": [{"type": "object", "properties": {"deep": {"type": "array", "items": {
                "type": "string", "enum": ["a", "b"]}}}, "additionalProperties": False}, {"type": "null"}]}
        elif form == 1:
            parameters["required"] = ["not_a_property"]
        elif form == 2:
            parameters = {"$schema": "http://json-schema.org/draft-07/schema#", **parameters,
                          "additionalProperties": False}
        function = {"name": name, "description": f"{tag} {self.words(max(4, size // 2))}", "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, tool: dict[str, Any], odd: bool) -> dict[str, Any]:
        """A call of it. odd: with an index, or with arguments as an object."""
        function = tool["function"]
        arguments = {name: self._value(schema.get("type")) for name, schema in
                     function["parameters"].get("properties", {}).items()}
        found: dict[str, Any] = {"id": f"call_{self.tag()}{self.tag()}", "type": "function", "function": {
            "name": function["name"], "arguments": json.dumps(arguments)}}
        if odd and self.chance.random() < 0.5:
            found["index"] = 0
        elif odd:
            found["function"]["arguments"] = arguments
        return found

    def _value(self, kind: str | None) -> Any:
        if kind == "integer":
            return self.chance.randint(0, 9999)
        if kind == "boolean":
            return self.chance.random() < 0.5
        return self.tag() + " " + self.words(self.chance.randint(2, 12))

    def picture(self) -> dict[str, Any]:
        """A part with a PNG as data URL, of coloured squares."""
        columns, rows = self.chance.randint(2, 6), self.chance.randint(2, 6)
        small = Image.new("RGB", (columns, rows))
        small.putdata([(self.chance.randrange(256), self.chance.randrange(256), self.chance.randrange(256))
                       for _ in range(columns * rows)])
        file = io.BytesIO()
        small.resize((columns * 64, rows * 64), Image.Resampling.NEAREST).save(file, "PNG")
        data = base64.b64encode(file.getvalue()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    def length(self) -> int:
        """Words of a message: log-normal, as replay_trace.py assumes for tokens."""
        return max(8, min(self.longest, round(self.chance.lognormvariate(5.52, 1.3))))

    def turns(self, tools: list[dict[str, Any]], begun: bool, oddities: float) -> Iterator[list[Message]]:
        """Endless steps of a conversation; each ends with what a model answers: a user's message or tools' results.

        begun: whether the last message so far is one that the model answers.
        """
        chance = self.chance
        while True:
            step: list[Message] = []
            odd = chance.random() < oddities
            if begun and tools and chance.random() < 0.8:
                calls = [self.call(chance.choice(tools), odd) for _ in range(chance.choice((1, 1, 1, 2)))]
                text = chance.random() < 0.4
                step.append({"role": "assistant", "content": f"{self.tag()} {self.words(chance.randint(5, 40))}"
                             if text else None, "tool_calls": calls})
                step += [{"role": "tool", "tool_call_id": call["id"],
                          "content": f"{self.tag()}\n{self.code(self.length())}"} for call in calls]
            else:
                if begun:
                    step.append({"role": "assistant", "content": f"{self.tag()} {self.words(self.length() // 2)}"})
                words = f"{self.tag()} {self.words(self.length() // 2)}"
                step.append({"role": "user", "content": [{"type": "text", "text": words}] if odd else words})
            yield step
            begun = True


def text_of(message: Message) -> str:
    """What of a message is rendered as text: to plan lengths with."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    calls = "".join(json.dumps(call["function"]) for call in message.get("tool_calls") or ())
    return (content or "") + calls


def padded(message: Message, words: str) -> Message:
    """The message with more text at its end."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content}\n{words}" if words else content}
    parts = [dict(part) for part in content]
    last = max(index for index, part in enumerate(parts) if part.get("type") == "text")
    parts[last]["text"] += f"\n{words}" if words else ""
    return {**message, "content": parts}


def cleaned(messages: list[Message]) -> list[Message]:
    """As the platform cleans system messages: leading ones are joined, later ones become the user's."""
    lead = next((index for index, message in enumerate(messages) if message["role"] not in ("system", "developer")),
                len(messages))
    joined = "\n\n".join(text_of(message) for message in messages[:lead])
    first: list[Message] = [{"role": "system", "content": joined}] if lead else []
    return first + [{**message, "role": "user"} if message["role"] in ("system", "developer") else message
                    for message in messages[lead:]]
