"""A conversation with a running server, as it goes: talk, a thought, a tool, JSON, a picture.

    python worklogs/conversation.py --base-url http://127.0.0.1:8000 [--model llm] [--wait PID]

Prints what is asked and, as they come, the model's thought, its words and its calls; nothing is judged. `make serve`
shows it when it serves the twin. --wait: until the server is ready; where its process, PID, ends first, without a word.
Exit status: 0 all was answered, 1 something was not.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import sys
import time
import urllib.request
from typing import Any

import openai
import server_url
from PIL import Image

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
          "required": ["name", "age"]}
RESULT = json.dumps({"temperature": 21, "condition": "sunny"})


class Unanswered(Exception):
    """The server did not say anything; one line."""


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


def red_square() -> str:
    """A picture of one colour, as a data URL."""
    data = io.BytesIO()
    Image.new("RGB", (64, 64), (255, 0, 0)).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


class Talk:
    """One conversation; its history grows with every question."""

    def __init__(self, client: openai.OpenAI, model: str, tools: list[dict[str, Any]] | None = None) -> None:
        self.client, self.model, self.messages = client, model, list[dict[str, Any]]()
        self.more: dict[str, Any] = {"tools": tools} if tools else {}

    def ask(self, text: str, content: list[dict[str, Any]] | None = None, **more: Any) -> None:
        """Prints a question and its answer; where tools are called, gives RESULT to each call and goes on."""
        say(f"you: {text}")
        self.messages.append({"role": "user", "content": content or text})
        calls = self.answer(**more)
        if calls:
            say(f"tool: {RESULT}")
            self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]
            self.answer(**more)

    def answer(self, thinking: bool = False, **more: Any) -> list[dict[str, Any]]:
        """Prints an answer while it comes, and returns its calls. Greedy, so that a model says the same each time.
        Raises Unanswered where nothing came, openai.OpenAIError, ValueError."""
        stream = self.client.chat.completions.create(
            model=self.model, messages=self.messages, stream=True, max_tokens=600, temperature=0,
            extra_body={"chat_template_kwargs": {"enable_thinking": thinking}}, **self.more, **more)
        parts: dict[str, str] = {}
        calls: list[dict[str, Any]] = []
        for chunk in stream:
            if not chunk.choices:
                continue
            delta = chunk.choices[0].delta
            for name, label in (("reasoning_content", "thought"), ("content", "model")):
                piece = getattr(delta, name, None)
                if not piece:
                    continue
                if name not in parts:
                    say(f"\n  {label}: " if parts else f"  {label}: ", "")
                parts[name] = parts.get(name, "") + piece
                say(piece, "")
            for call in delta.tool_calls or ():
                if call.index == len(calls):
                    calls.append({"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}})
                for name in ("name", "arguments"):
                    calls[call.index]["function"][name] += getattr(call.function, name) or ""
        if not parts and not calls:
            raise Unanswered("an answer without thoughts, words and calls")
        if parts:
            say("")
        for call in calls:
            say(f"  call: {call['function']['name']} {call['function']['arguments']}")
        self.messages.append({"role": "assistant", "content": "", **parts, **({"tool_calls": calls} if calls else {})})
        return calls


def converse(client: openai.OpenAI, model: str) -> None:
    """The whole conversation."""
    words = Talk(client, model)
    words.ask("The secret word is MAPLE_73. Remember it.")
    words.ask("What is 3 + 4?", thinking=True)
    words.ask("What is the secret word?")
    say("")
    Talk(client, model, [WEATHER]).ask("What is the weather in Beijing?")
    say("")
    Talk(client, model).ask("JSON of a person with name Alice and age 30", response_format={
        "type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}})
    say("")
    text = "What colour is this picture?"
    Talk(client, model).ask(f"[a red square] {text}", [
        {"type": "image_url", "image_url": {"url": red_square()}}, {"type": "text", "text": text}])


def ready(base: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def wait(base: str, server: int) -> bool:
    """Whether the server became ready before its process ended. What answers before it can have started is another
    one, which has the port; its own will end for that."""
    if ready(base):
        return False
    while not ready(base):
        try:
            os.kill(server, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.5)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", type=server_url.base, default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--wait", type=int, metavar="PID")
    args = parser.parse_args()
    base = args.base_url
    if args.wait and not wait(base, args.wait):
        return 1
    try:
        say("")
        key = os.environ.get("VLLM_API_KEY", "none")
        converse(openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0), args.model)
        say("")
    except (openai.OpenAIError, Unanswered, ValueError) as error:
        print(f"\nconversation: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
