"""What is recalled: chats of tests/twin that no training has seen, with words, numbers and codes told in one of several
turns, side talk between, and a question at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chats import NEW_VALUES, NEW_WORDING, Chat
from tasks import draw

from tests.meaning.served import Said

# Characters of a prompt: long enough that a state of it is kept, short enough for the stressed server.
SHORTEST, LONGEST = 400, 2200


@dataclass(frozen=True)
class Item:
    chat: Chat
    thinking: bool

    @property
    def question(self) -> tuple[list[dict[str, Any]], bool]:
        return self.chat.messages, self.thinking

    def right(self, said: Said) -> bool:
        return said.content == self.chat.answer and said.finish == "stop" and bool(said.thought) == self.thinking


def recall_chats(count: int, seed: str, shortest: int = SHORTEST) -> list[Chat]:
    """The same every time; half of them in wordings that are new."""
    rng, out = random.Random(f"meaning {seed}"), list[Chat]()
    while len(out) < count:
        chat = draw(rng, "recall", 1 + len(out) % 2, (NEW_VALUES, NEW_WORDING)[len(out) // 2 % 2])
        if shortest <= len(chat.prompt()) <= LONGEST:
            out.append(chat)
    return out


def accuracy(items: Sequence[Item], answers: Sequence[Said]) -> float:
    return sum(item.right(answer) for item, answer in zip(items, answers, strict=True)) / len(items)
