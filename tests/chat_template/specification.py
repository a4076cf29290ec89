"""What the template must render, said a second time in plain Python, to compare the two on random conversations."""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")
TOOL_ROLES = ("tool", "function")
INSTRUCTIONS = """

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
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>"""


def text_of(content: Any) -> str:
    """The trimmed text of a message's content; a picture or video is its three placeholder tokens."""
    parts = [content] if isinstance(content, (str, dict)) else content or []
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part.get("type") in ("image", "image_url", "input_image"):
            texts.append("<|vision_start|><|image_pad|><|vision_end|>")
        elif part.get("type") in ("video", "video_url"):
            texts.append("<|vision_start|><|video_pad|><|vision_end|>")
        else:
            texts.append(part["text"] or "")
    return "".join(texts).strip()


def is_question(message: Message) -> bool:
    """Whether it is a user's turn and not a tool's result wrapped in one."""
    text = text_of(message["content"]) if message["role"] == "user" else None
    return text is not None and not (text.startswith("<tool_response>") and text.endswith("</tool_response>"))


def last_question(messages: list[Message]) -> int:
    """Its index, or -1."""
    return max((index for index, message in enumerate(messages) if is_question(message)), default=-1)


def call_text(call: Message) -> str:
    """One call in the model's own notation."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = {"arguments": arguments} if arguments.strip() else {}
    elif arguments is not None and not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    lines = [f"<tool_call>\n<function={function['name']}>\n"]
    for name, value in (arguments or {}).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"<parameter={name}>\n{text}\n</parameter>\n")
    return "".join(lines) + "</function>\n</tool_call>"


def answer_text(message: Message) -> str:
    """What follows the thought: the text and the calls."""
    text = split_thought(message)[1]
    calls = "\n".join(call_text(call) for call in message.get("tool_calls") or [])
    return text + ("\n\n" if text and calls else "") + calls


def split_thought(message: Message) -> tuple[str, str]:
    """(thought, text) of an assistant's message; a think block inside the text counts where no field has a thought."""
    text = text_of(message.get("content"))
    for field in ("reasoning_content", "reasoning"):
        if isinstance(message.get(field), str):
            return message[field].strip(), text
    if "</think>" not in text:
        return "", text
    before, after = text[: text.index("</think>")], text[text.rindex("</think>") + len("</think>") :]
    return before[before.rindex("<think>") + len("<think>") if "<think>" in before else 0 :].strip(), after.lstrip("\n")


def specified(
    messages: list[Message],
    tools: list[Message] | None = None,
    add_generation_prompt: bool = False,
    enable_thinking: bool = True,
    preserve_thinking: bool = False,
) -> str:
    """The whole prompt."""
    turns: list[tuple[str, str]] = []
    rest = list(messages)
    leading = []
    while rest and rest[0]["role"] in SYSTEM_ROLES:
        leading.append(text_of(rest.pop(0)["content"]))
    system = "\n\n".join(filter(None, leading))
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        intro = "# Tools\n\nYou have access to the following functions:\n\n<tools>" + listed + "\n</tools>"
        turns.append(("system", intro + INSTRUCTIONS + (f"\n\n{system}" if system else "")))
    elif leading:
        turns.append(("system", system))
    question = last_question(rest)
    previous = None
    for index, message in enumerate(rest):
        role, text = message["role"], text_of(message.get("content"))
        if role in TOOL_ROLES:
            result = f"<tool_response>\n{text}\n</tool_response>"
            if previous in TOOL_ROLES:
                turns[-1] = ("user", f"{turns[-1][1]}\n{result}")
            else:
                turns.append(("user", result))
        elif role == "assistant":
            keep = preserve_thinking or index > question
            thought = f"<think>\n{split_thought(message)[0]}\n</think>\n\n" if keep else ""
            turns.append(("assistant", thought + answer_text(message)))
        else:
            turns.append(("system" if role in SYSTEM_ROLES else role, text))
        previous = role
    prompt = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    if add_generation_prompt:
        prompt += "<|im_start|>assistant\n<think>\n" + ("" if enable_thinking else "\n</think>\n\n")
    return prompt
