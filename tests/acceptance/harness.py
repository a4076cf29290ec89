"""What the platform's harness does around its checks: it asks what the server is and how its thoughts are switched,
then sends each check's requests one by one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.acceptance import questions, rules
from tests.acceptance.questions import FALLBACK, QUESTIONS, SPELLINGS, TRIED, Request
from tests.acceptance.table import rule_of
from tests.conformance.checks import Check, Failed, Outcome, expect, run_check
from tests.conformance.target import CHAT, Answer, Streamed, Target

WHO = ("/get_model_info", "/get_server_info", "/version")
LONG_OUTPUT = "long_output"
# Of the tokens that are forced.
_ENOUGH = 0.95
# No limit of the module has been seen.
_LONG_S = 7200.0


@dataclass(frozen=True)
class Server:
    """What the probes found. direct: the path whose answer makes it a bare engine, or None. spelling: of the thinking
    switch; found: whether it was seen to work. thinks: without a switch."""

    direct: str | None
    spelling: str
    found: bool
    thinks: bool

    def __str__(self) -> str:
        kind = f"a bare engine, by {self.direct}" if self.direct else "no bare engine"
        how = "" if self.found else " (none was seen to work)"
        return f"{kind}; thinking switch {self.spelling}{how}; thinks {'' if self.thinks else 'not '}without one"


class Harness:
    """The checks against one server. Its probes are sent by `probe`, which comes first."""

    def __init__(self, base: str, model: str, key: str = "none", timeout: float = 300.0) -> None:
        """base: with or without ``/v1``; timeout: seconds that a request may take."""
        keys = {"own": key, "none": None, "wrong": "wrong-key"}
        self._targets = {name: Target(base, model, sent, timeout, whole=timeout) for name, sent in keys.items()}
        self._long = Target(base, model, key, _LONG_S)
        self.target = self._targets["own"]
        self.server = Server(None, FALLBACK, False, True)

    def probe(self) -> Server:
        """Asks what the server is, and how it can be told not to think. Raises httpx.HTTPError."""
        direct = next((path for path in WHO if _is_json(self.target.get(path))), None)
        thinks = bool(self._trial(None)[0])
        for spelling in TRIED:
            thought, content = self._trial(spelling)
            if not thought and content:
                self.server = Server(direct, spelling, True, thinks)
                break
        else:
            thought, content = self._trial(FALLBACK)
            self.server = Server(direct, FALLBACK, bool(not thought and content), thinks)
        return self.server

    def _trial(self, spelling: str | None) -> tuple[str, str]:
        """(thought, content) of a trial; empty where it is refused or answered in another form, which is for the
        checks to tell of."""
        switch = SPELLINGS[spelling](False) if spelling else {}
        answer = self.target.chat(questions.user("2+2=?"), temperature=0, max_tokens=512, **switch)
        if not 200 <= answer.status < 300:
            return "", ""
        try:
            one = rules.said(answer)
            return one.thought.strip(), one.content.strip()
        except (Failed, KeyError, TypeError, IndexError, AttributeError):
            return "", ""

    def run(self, name: str) -> Outcome:
        """What became of one of the 56 checks."""
        return run_check(Check(name, lambda _: self._judged(name)), self.target)

    def _judged(self, name: str) -> str:
        rule = rule_of(name, self.server.direct is not None)
        return rule([self._send(request) for request in QUESTIONS[name]()])

    def _send(self, request: Request) -> Answer:
        time.sleep(request.after)
        switch: dict[str, Any] = {} if request.thinking is None else SPELLINGS[self.server.spelling](request.thinking)
        target = self._targets[request.key]
        return target.send(CHAT, {"model": target.model, **request.body, **switch})

    def run_long_output(self, at_once: int, tokens: int) -> Outcome:
        """What became of the long-output module: all requests at once, each of which must yield 95 % of its tokens."""
        def judged(_: Target) -> str:
            with ThreadPoolExecutor(at_once) as pool:
                yielded = list(pool.map(lambda number: self._yield(number, tokens), range(at_once)))
            shown = ", ".join(f"{count} tokens in {seconds:.0f} s" for count, seconds in yielded)
            expect(all(count >= int(_ENOUGH * tokens) for count, _ in yielded),
                   f"fewer than {int(_ENOUGH * tokens)} of {tokens}: {shown}")
            return shown
        return run_check(Check(LONG_OUTPUT, judged), self._long)

    def _yield(self, number: int, tokens: int) -> tuple[int, float]:
        """(tokens, seconds) of one long answer: by its usage, or else by its events with text."""
        request = questions.essay(number, tokens)
        start = time.monotonic()
        answer = self._long.send(CHAT, {"model": self._long.model, **request.body})
        rules.served(answer)
        expect(isinstance(answer, Streamed), f"no stream: {answer}")
        count = rules.last_usage(answer).get("completion_tokens") or events_with_text(answer)
        return count, time.monotonic() - start


def events_with_text(answer: Answer) -> int:
    """How many events of a stream bring text."""
    assert isinstance(answer, Streamed)
    deltas = [choice["delta"] for chunk in answer.chunks() for choice in chunk.get("choices") or []]
    return sum(any(delta.get(name) for name in ("content", *rules.FIELDS)) for delta in deltas)


def _is_json(answer: Answer) -> bool:
    return answer.status == 200 and answer.headers.get("content-type", "").startswith("application/json")

