"""A check: one thing that a server must do, tried over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from tests.conformance.target import Target


class Failed(Exception):
    """The server did not do what the check asks; the message says what it did."""


class Skipped(Exception):
    """Nothing can be said; the message says why."""


@dataclass(frozen=True)
class Check:
    """run: raises Failed or Skipped, or returns, where it is worth telling with what it saw. slow: it takes minutes on
    a CPU."""

    id: str
    run: Callable[[Target], str | None]
    slow: bool = False


@dataclass(frozen=True)
class Outcome:
    """verdict: ``ok``, ``failed`` or ``skipped``; why: what was seen."""

    id: str
    verdict: str
    why: str
    seconds: float


def expect(condition: object, why: object) -> None:
    """Raise Failed with ``why``, cut to a readable length, unless the condition holds."""
    if not condition:
        raise Failed(f"{why}"[:1500])


def run_check(check: Check, target: Target) -> Outcome:
    """What became of one check. A connection that breaks and a timeout are failures."""
    start = time.monotonic()
    verdict, why = "ok", ""
    try:
        why = check.run(target) or ""
    except Skipped as error:
        verdict, why = "skipped", str(error)
    except Failed as error:
        verdict, why = "failed", str(error)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        # Beside the connection's errors: an answer of another form than any check expects.
        verdict, why = "failed", f"{type(error).__name__}: {error}"[:1500]
    return Outcome(check.id, verdict, why, time.monotonic() - start)


def run_checks(checks: Sequence[Check], target: Target, at_a_time: int,
               told: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """All outcomes, in the checks' order; ``told`` is called with each as soon as those before it are known."""
    outcomes = []
    with ThreadPoolExecutor(at_a_time) as pool:
        for outcome in pool.map(lambda check: run_check(check, target), checks):
            told(outcome)
            outcomes.append(outcome)
    return outcomes
