"""What to train on next: by the accuracy on fresh samples, not by the clock."""

from __future__ import annotations

import random
from typing import Any

from tasks import TASKS

# Learned first, in short samples: copying is what everything else is made of.
FIRST = ("echo", "recall", "table", "json", "obey", "count", "talk")
GATE = ("echo", "recall", "table", "json")
IMPORTANCE = {
    "echo": 3.0,
    "recall": 1.5,
    "tools": 1.6,
    "files": 0.8,
    "picture": 1.2,
    "story": 0.5,
    "arithmetic": 1.2,
    "wonder": 0.3,
    "talk": 0.5,
    "no tool": 0.5,
    "two digits": 0.6,
}
UNLOCK, ADVANCE, LAST_LEVEL = 0.7, 0.9, 2
# Samples that a judgement is made on, and how fast older ones fade (a step).
ENOUGH, FADE = 80, 0.98
# Free text is never right token by token: it has all lengths from the start, and a fixed share.
UNJUDGED, UNJUDGED_ACCURACY = ("story",), 0.8
# If the gate is not reached by this share of the training, the other tasks join all the same.
LATEST = 0.15


class Curriculum:
    """Levels, running accuracies and the tasks in play. The same numbers on every process."""

    def __init__(self) -> None:
        self.level = dict.fromkeys(TASKS, 0)
        self.right = dict.fromkeys(TASKS, 0.0)
        self.seen = dict.fromkeys(TASKS, 0.0)
        self.tokens = dict.fromkeys(TASKS, 100.0)
        self.all = False

    def accuracy(self, task: str) -> float:
        if task in UNJUDGED:
            return UNJUDGED_ACCURACY
        return self.right[task] / self.seen[task] if self.seen[task] else 0.0

    def shares(self) -> dict[str, float]:
        """Task -> relative share of the samples."""
        out = {}
        for task in TASKS if self.all else FIRST:
            missing = 0.25 + 1 - self.accuracy(task) + 0.2 * (LAST_LEVEL - self.level[task])
            out[task] = IMPORTANCE.get(task, 1.0) * missing / self.tokens[task] ** 0.5
        return out

    def choose(self, rng: random.Random) -> tuple[str, int]:
        """A task and a level: mostly the task's own, else one below."""
        shares = self.shares()
        task = rng.choices(list(shares), list(shares.values()))[0]
        if task in UNJUDGED:
            return task, rng.randint(0, LAST_LEVEL)
        level = self.level[task]
        return task, level if level == 0 or rng.random() < 0.7 else rng.randrange(level)

    def update(self, right: list[float], seen: list[float], tokens: list[float], fraction: float) -> None:
        """right, seen, tokens: per task in the order of TASKS, this step's samples of the task's own level."""
        for task, hits, count, size in zip(TASKS, right, seen, tokens, strict=True):
            self.right[task] = self.right[task] * FADE + hits
            self.seen[task] = self.seen[task] * FADE + count
            if count:
                self.tokens[task] += 0.02 * (size / count - self.tokens[task])
            judged = task not in UNJUDGED and self.seen[task] >= ENOUGH
            if judged and self.accuracy(task) >= ADVANCE and self.level[task] < LAST_LEVEL:
                self.level[task] += 1
                self.right[task] = self.seen[task] = 0.0
        self.all |= fraction >= LATEST or all(
            self.level[task] or (self.seen[task] >= ENOUGH and self.accuracy(task) >= UNLOCK) for task in GATE
        )

    def finish(self) -> None:
        """All tasks in play, at the last level: of weights that have been through the rest."""
        self.level, self.all = dict.fromkeys(TASKS, LAST_LEVEL), True

    def state(self) -> dict[str, Any]:
        return dict(vars(self))

    def load(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
