"""One training sample: a chat whose last turn is to be learned, its text in the template, and which split it is of.

Train and held-out are disjoint by construction: a hash of the wording (the sentence before the values are put in) sets
some wordings aside, a hash of the whole prompt some values of the others. No acceptance prompt that decides a check by
what it says is in either (`too_near`); the same task in other words is ("Quick question: what is 2 + 2?").
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TRAIN, NEW_VALUES, NEW_WORDING = "train", "new values", "new wording"
# The acceptance prompts (PLATFORM 3.2), so far as they are known, as `squeezed` leaves them.
PROMPTS = frozenset(
    (
        "whatis2+2",
        "2+2=",
        "2+2=直接给数字",
        "2+2",
        "hi",
        "hibriefly",
        "sayhibriefly",
        "writeashortstory",
        "count1to5inenglish",
        "count1to30",
        "countfrom1to30",
        "countto30",
        "anything",
        "sayhelloinexactlyoneword",
        "whatisthesecretword",
        "countfrom1to30onenumberperline",
        "ihave3applesieat1andgive1awayhowmanyapplesareleft",
        "twotrains300kmapartdrivetowardseachotherat70km/hand80km/hwhendotheymeetexplain",
        "whatcolouristhispictureanswerinasentence",
        "thispicturehasfourquadrantsnamethecolourofeachoneinenglish",
        "whatisthis",
    )
)
PAYLOADS = (
    "no_system",
    "system_control",
    "blue_42",
    "中文测试",
    "你好世界",
    "日本語:",
    "日本語：",
    "こんにちは",
    "🎉🚀",
    "🇨🇳",
)
# Values that stand together in a check.
TOGETHER = (("alice", "30"), ("beijing", "weather"), ("北京", "天气"))


@dataclass
class Picture:
    """RGB, drawn by pictures.py. colours: one, or four (top left, top right, bottom left, bottom right)."""

    size: tuple[int, int]
    colours: tuple[tuple[int, int, int], ...]


@dataclass
class Chat:
    """messages: up to the prompt's end, in the form of the API. thought: None where thinking is switched off."""

    task: str
    wording: str
    messages: list[dict[str, Any]]
    answer: str
    thought: str | None = None
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    picture: Picture | None = None

    def prompt(self) -> str:
        """The template's text up to the opened (or closed) thought."""
        return (
            render(self.messages, self.tools)
            + "<|im_start|>assistant\n"
            + ("<think>\n\n</think>\n\n" if self.thought is None else "<think>\n")
        )

    def target(self) -> str:
        """What the model is to write."""
        calls = "".join(
            ("\n\n" if index == 0 and self.answer else "\n" if index else "") + call_text(name, arguments)
            for index, (name, arguments) in enumerate(self.calls)
        )
        thought = "" if self.thought is None else f"{self.thought}\n</think>\n\n"
        return f"{thought}{self.answer}{calls}<|im_end|>"


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the template writes it."""
    parts = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n"
        "</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


HEAD = "<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>"
TAIL = """
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT \
after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>"""


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """chat_template_multi_system.jinja for what the generator makes, ten times as fast (test_chats.py compares)."""
    out, rest = "", messages
    lead = ""
    if messages[0]["role"] == "system":
        lead, rest = messages[0]["content"], messages[1:]
    if tools:
        out = (
            HEAD
            + "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
            + TAIL
            + ("\n\n" if lead else "")
            + lead
            + "<|im_end|>\n"
        )
    elif lead:
        out = f"<|im_start|>system\n{lead}<|im_end|>\n"
    question = max(index for index, message in enumerate(rest) if message["role"] == "user")
    for index, message in enumerate(rest):
        role = message["role"]
        text = message.get("content") or ""
        if not isinstance(text, str):
            text = "".join(
                part["text"] if part["type"] == "text" else "<|vision_start|><|image_pad|><|vision_end|>"
                for part in text
            )
        if role == "tool":
            first = rest[index - 1]["role"] != "tool"
            last = index + 1 == len(rest) or rest[index + 1]["role"] != "tool"
            out += (
                ("<|im_start|>user" if first else "")
                + f"\n<tool_response>\n{text.strip()}\n</tool_response>"
                + ("<|im_end|>\n" if last else "")
            )
        elif role == "assistant":
            thought = message.get("reasoning_content", "")
            calls = [
                call_text(call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls", ())
            ]
            out += (
                "<|im_start|>assistant\n"
                + (f"<think>\n{thought}\n</think>\n\n" if index > question else "")
                + text
                + ("\n\n" if text and calls else "")
                + "\n".join(calls)
                + "<|im_end|>\n"
            )
        else:
            out += f"<|im_start|>{role}\n{text.strip()}<|im_end|>\n"
    return out


def expand(rng: random.Random, pattern: str) -> str:
    """One of the sentences of a pattern: [a|b|] is a choice and may hold others; {name} is left for the values."""
    while "[" in pattern:
        pattern = re.sub(r"\[([^\[\]]*)\]", lambda found: rng.choice(found[1].split("|")), pattern)
    text = re.sub(r" +", " ", pattern).strip()
    return text[:1].upper() + text[1:] if rng.random() < 0.7 else text


def share(text: str) -> float:
    """A number in [0, 1) that depends on the text only."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64


def split_of(chat: Chat) -> str:
    """TRAIN, NEW_VALUES (a wording that training has, with values that it has not) or NEW_WORDING."""
    if share("wording:" + squeezed(chat.wording)) < 0.08:
        return NEW_WORDING
    return NEW_VALUES if share("prompt:" + squeezed(chat.prompt()) + str(chat.picture)) < 0.06 else TRAIN


def squeezed(text: str) -> str:
    """Lower case without white space and punctuation (operators stay) and without words of courtesy."""
    text = re.sub(r"\b(please|kindly)\b|请", "", text.lower())
    return re.sub(r"[\s.,;:!?？。，！：；'\"`*()（）「」]+", "", text)


def text_of(message: Mapping[str, Any]) -> str:
    """What a message of the API's form says; of parts those with text."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def too_near(chat: Chat) -> bool:
    """Whether a chat is, but for case, spaces, punctuation and courtesy, an acceptance prompt, or holds the text, the
    pair of values or the picture that one of the checks asks for."""
    texts = [text_of(message) for message in chat.messages]
    everything = "\n".join(texts).lower()
    if any(squeezed(text) in PROMPTS for text in texts) or any(payload in everything for payload in PAYLOADS):
        return True
    names = everything + " ".join(json.dumps(tool) for tool in chat.tools).lower()
    if any(all(part in names for part in pair) for pair in TOGETHER):
        return True
    if chat.picture is not None:
        colours = chat.picture.colours
        pure = tuple(tuple(round(value / 255) for value in colour) for colour in colours)
        return colours == ((255, 0, 0),) or pure == ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0))
    return False
