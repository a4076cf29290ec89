"""Random texts in many scripts. Half of the words are pieces of the vocabulary, so that long merges occur."""

from __future__ import annotations

import random
from collections.abc import Iterable

CODE = ("def f(x):", "    return x", "\n", "\t", "if (a != b) {", "}", "//", "/* é */", "&&", "->", "::", "x_1", "0xFF",
        ";", "<div class='a'>", "</div>", "$HOME", "#!/bin/sh", "it's", "WE'LL", "'S", "'ſ", "λx.x", "a.b.c()", "===",
        "\r\n")
EMOJI = ("🎉", "🚀", "✨", "🇨🇳", "🇩🇪", "👩\u200d👩\u200d👧\u200d👦", "👍🏽", "❤️",
         "🏳️\u200d🌈", "1️⃣", "😀", "🧑🏿\u200d🚀", "☃", "\ufe0f", "\u200d")
BLANKS = (" ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", "\r", "\u00a0", "\u3000", "\u2003", "\u2028",
          "\u200b", "\x0b", "\x85")
ALPHABETS = {
    "latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x1E00, 0x1EFF)),
    "cyrillic": ((0x400, 0x52F),),
    "greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "arabic": ((0x600, 0x6FF), (0x750, 0x77F)),
    "hebrew": ((0x590, 0x5FF),),
    "devanagari": ((0x900, 0x97F),),
    "thai": ((0xE00, 0xE7F),),
    "chinese": ((0x4E00, 0x9FFF), (0x3400, 0x3450), (0x20000, 0x20100), (0x3000, 0x303F), (0xFF00, 0xFF60)),
    "japanese": ((0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF61, 0xFF9F)),
    "korean": ((0xAC00, 0xD7A3), (0x1100, 0x11FF), (0x3130, 0x318F)),
    "digits": ((0x30, 0x39), (0x660, 0x669), (0x966, 0x96F), (0x2160, 0x2188), (0xB2, 0xB9), (0xBC, 0xBE)),
    "marks": ((0x300, 0x36F), (0x483, 0x489), (0x20D0, 0x20F0), (0x61, 0x7A), (0xC0, 0xFF)),
}
KINDS = (*ALPHABETS, "emoji", "code", "blanks")


class Texts:
    """Texts of a kind, from one seed. `vocabulary`: tokens as text, to take words from."""

    def __init__(self, vocabulary: Iterable[str], seed: int) -> None:
        self.random = random.Random(seed)
        kind_of = {chr(code): kind for kind, ranges in ALPHABETS.items() for first, last in ranges
                   for code in range(first, last + 1)}
        self.words: dict[str, list[str]] = {kind: [] for kind in ALPHABETS}
        for token in vocabulary:
            kind = kind_of.get(token.strip()[:1])
            if kind:
                self.words[kind].append(token)

    def word(self, kind: str) -> str:
        """One word or mark."""
        listed = {"emoji": EMOJI, "code": CODE, "blanks": BLANKS}.get(kind)
        if listed:
            return self.random.choice(listed)
        if self.random.random() < 0.5 and self.words[kind]:
            return self.random.choice(self.words[kind])
        ranges = self.random.choices(ALPHABETS[kind], k=self.random.randint(1, 8))
        return "".join(chr(self.random.randint(*limits)) for limits in ranges)

    def text(self, *kinds: str) -> str:
        """1 to 12 words of these kinds, some of them apart."""
        words = [self.word(self.random.choice(kinds)) for _ in range(self.random.randint(1, 12))]
        return "".join(word + self.random.choice(("", "", " ", " ", ", ", "\n")) for word in words)
