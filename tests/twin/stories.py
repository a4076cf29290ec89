"""Short stories: a beginning, a problem, tries, a good end; 100 to 600 tokens, and always an end."""

# Lists of words and sentences read better in one piece.
# ruff: noqa: E501, SIM905
from __future__ import annotations

import random

from words import ADJECTIVES, COLOURS, NAMES, PLACES, THINGS

BEGIN = (
    "Once upon a time there was a {a} {n} called {m}.",
    "Long ago, a {a} {n} called {m} lived near a {p}.",
    "In a {b} {p} there lived a {n}. Its name was {m}.",
    "There was once a {a} {n} whose name was {m}.",
)
OWN = (
    "{m} had a {c} {t} and loved it very much.",
    "Every day {m} played with a {c} {t}.",
    "The best thing that {m} had was a {c} {t}.",
    "{m} kept a {c} {t} at home.",
)
LOSS = (
    "One morning the {t} was gone.",
    "One day the wind took the {t} away.",
    "But one evening {m} could not find the {t}.",
    "Then the {t} fell into the water and was lost.",
)
SAD = (
    "{m} was very sad.",
    "{m} looked everywhere and found nothing.",
    "What could {m} do now?",
    "{m} sat down and thought for a long time.",
)
TRY = (
    "First {m} went to the {p} and asked a {k}. The {k} had seen nothing.",
    "Then {m} walked to the {p}. It was {b} there, but the {t} was not to be seen.",
    "{m} climbed a hill and looked around. There was only a {c} {u}.",
    "A {k} said: \"Look near the {p}.\" So {m} ran to the {p}.",
    "In the {p} {m} found a {u}, but no {t}.",
    "It began to rain, and {m} waited under a tree.",
    "The night was long, and {m} slept in the {p}.",
)
FRIEND = (
    "Then {m} met {l}, a {b} {k}.",
    "On the way {m} met a {b} {k} called {l}.",
    "At last a {k} came by. It was {l}, an old friend.",
)
HELP = (
    "\"I will help you,\" said {l}.",
    "{l} smiled and said: \"Come with me.\"",
    "\"Do not be sad,\" said {l}. \"We will find it together.\"",
)
FIND = (
    "They looked behind a big stone, and there was the {t}!",
    "Under a {c} {u} they found the {t}.",
    "In the {p} something was shining. It was the {t}!",
    "{l} had found the {t} the day before and gave it back.",
)
END = (
    "{m} was happy again, and the two were friends from that day on.",
    "They went home together and had a warm supper.",
    "From then on {m} took good care of the {t}.",
    "And if you go to the {p}, you may still see them play.",
)
LAST = ("The end.", "And so the story ends.", "They lived happily ever after.")
KINDS = "fox bear rabbit owl cat dog horse mouse turtle frog deer goose duck crow badger".split()


def tale(rng: random.Random, animal: str, thing: str, level: int) -> str:
    """A story about a {animal} and a {thing}; its length grows with level 0 to 2."""
    m, friend = rng.sample(NAMES, 2)
    fixed = {"n": animal, "t": thing, "m": m, "l": friend, "k": rng.choice(KINDS)}
    parts = [
        [BEGIN, OWN],
        [LOSS, SAD],
        *[[TRY]] * rng.randint(1, (1, 3, 6)[level]),
        [FRIEND, HELP],
        [FIND],
        [END, LAST],
    ]
    used: set[str] = set()
    paragraphs = []
    for part in parts:
        sentences = []
        for choices in part:
            pattern = rng.choice([choice for choice in choices if choice not in used])
            used.add(pattern)
            sentences.append(
                pattern.format(
                    a=rng.choice(ADJECTIVES),
                    b=rng.choice(ADJECTIVES),
                    c=rng.choice(COLOURS),
                    p=rng.choice(PLACES),
                    u=rng.choice(THINGS),
                    **fixed,
                )
            )
        paragraphs.append(" ".join(sentences))
    return "\n\n".join(paragraphs)
