"""The program of a trial: compiles each grammar that it is sent, and answers when it has survived that.

Run as a file of its own, not as a part of vllm, which would take seconds to import: `trial.py` starts it. Standard
input: one line of JSON that describes the vocabulary (see `trial.py`), then for each grammar its length in bytes as a
line, and the bytes. Standard output: one line when it is ready, and one for each grammar, as soon as it is done. What a
grammar amounts to is not said: whoever asks finds that out without risk, once the trial is over.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from typing import Any

# Stack of the thread that compiles, in bytes. Who compiles afterwards has more of it.
STACK = 16 * 2**20


class _Words:
    """A vocabulary of single bytes, and of the control tokens that grammars may name, at their own ids."""

    bos_token_id = None

    def __init__(self, control: dict[int, str], ends: list[int]) -> None:
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted(control)
        self.tokens = [b""] * (max([*control, 256]) + 1)
        for token, name in control.items():
            self.tokens[token] = name.encode()
        free = (token for token in range(len(self.tokens) + 256) if token not in control)
        self._of_byte = [next(free) for _ in range(256)]
        self.tokens += [b""] * (self._of_byte[-1] + 1 - len(self.tokens))
        for byte, token in enumerate(self._of_byte):
            self.tokens[token] = bytes([byte])

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            # TokenizerWrapper tries whether bytes are taken.
            raise TypeError("text is taken, not bytes")
        return [self._of_byte[byte] for byte in text.encode()]


def compile_each(about: dict[str, Any]) -> None:
    """Until standard input ends."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    words = _Words({int(token): name for token, name in about["control"].items()}, about["ends"])
    size = max(about["size"], len(words.tokens))
    vocabulary = LLTokenizer(TokenizerWrapper(words), n_vocab=size, eos_token=about["ends"])
    limits = LLParserLimits(max_lexer_states=about["states"], verbose_errors=False)
    print(flush=True)
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        until = int(used.ru_utime + used.ru_stime + about["seconds"]) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        grammar = sys.stdin.buffer.read(int(line)).decode()
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(flush=True)


def main() -> None:
    """In a thread with a stack of its own size, whatever the system gives to others."""
    # This folder, whose names are not meant for everybody.
    del sys.path[0]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    about = json.loads(sys.stdin.buffer.readline())
    resource.setrlimit(resource.RLIMIT_AS, (about["bytes"], about["bytes"]))
    threading.stack_size(STACK)
    thread = threading.Thread(target=compile_each, args=(about, ))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
