"""Grammars that would take the server with them are found out in another process.

The library's own limits do not hold everywhere: a schema of 30 KB whose $refs form a chain overflows the stack, which
ends the process, and intersections of patterns take minutes. So a grammar of a client is compiled by a process that
may die, or be ended, first. That takes a few milliseconds more for a grammar that is new.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = init_logger(__name__)

_PROGRAM = Path(__file__).with_name("trial_process.py")
# Of processor time for one grammar; those of real schemas, up to 2 MB long, take at most one second.
_SECONDS = 5
# On a machine whose processors do other things, until it is given up.
_PATIENCE_S = 60
_BYTES = 4 * 2**30


class TrialFailed(ValueError):
    """A grammar that must not be compiled here; the message says why."""


class Trial:
    """One process that tries grammars, one after another. Not for several threads at once."""

    def __init__(self, vocabulary: LLTokenizer, states: int) -> None:
        """Starts the process. states: that a lexer may have, as where the grammar is compiled afterwards."""
        self._about = json.dumps(_described(vocabulary, states)).encode() + b"\n"
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        self.close()
        try:
            self._process = subprocess.Popen([sys.executable, _PROGRAM], stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except OSError as error:
            logger.warning("no process can be started that tries grammars: %s", error)
            return
        if not self._answers(self._about):
            logger.warning("the process that tries grammars does not start")

    def survive(self, grammar: str) -> None:
        """Returns when the process has compiled the grammar, whether or not it is one; at once where there is no
        process to be had.

        Raises:
            TrialFailed: it died of it, or took too long.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        data = grammar.encode()
        if self._process is not None and not self._answers(b"%d\n%b" % (len(data), data)):
            logger.warning("A grammar of %d characters was too much to compile, and is refused", len(grammar))
            raise TrialFailed(f"it is nested too deeply, or takes more than {_SECONDS} s or {_BYTES >> 30} GiB to "
                              "compile")

    def _answers(self, message: bytes) -> bool:
        """Whether the process takes a message and answers it; otherwise it is ended."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        answered = False
        try:
            process.stdin.write(message)
            process.stdin.flush()
            readable, _, _ = select.select([process.stdout], [], [], _PATIENCE_S)
            answered = bool(readable) and process.stdout.readline() == b"\n"
        except BrokenPipeError:
            logger.debug("the process that tries grammars is gone")
        finally:
            if not answered:
                self.close()
        return answered

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _described(vocabulary: LLTokenizer, states: int) -> Mapping[str, Any]:
    control = {token: vocabulary.decode_bytes([token]).decode("utf-8", "replace")
               for token in range(vocabulary.vocab_size) if vocabulary.is_special_token(token)}
    return {"size": vocabulary.vocab_size, "control": control, "ends": vocabulary.eos_tokens, "states": states,
            "seconds": _SECONDS, "bytes": _BYTES}
