"""Whether the record of a formal run is what was kept: the form of its fields, and figures that its samples give."""
import math
from collections.abc import Callable
from typing import Any

from . import definitions, stats

Record = dict[str, Any]
# Figures are computed from the samples in one order; JSON keeps every digit.
SAME = 1e-9


class RecordError(Exception):
    """A record that cannot be used; one line that says why."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# What a record's fields must be, and a sample's: the test, its words, and whether null or nothing at all will do.
Rule = tuple[Callable[[Any], bool], str, bool]
FIELDS: dict[str, Rule] = {
    "server": (lambda value: isinstance(value, dict), "an object", False),
    "dataset": (lambda value: isinstance(value, dict), "an object", False),
    "mode": (lambda value: value in ("closed", "open"), "'closed' or 'open'", False),
    "wall_s": (lambda value: _number(value) and value > 0, "a number of seconds", False),
    "samples": (lambda value: isinstance(value, list), "a list", False),
    "summary": (lambda value: isinstance(value, dict), "an object", False),
    "client": (lambda value: isinstance(value, dict), "an object", True),
    "others_cores": (_number, "a number", True), "sittings": (_count, "a count", True),
}
SAMPLE: dict[str, Rule] = {
    **dict.fromkeys(("index", "turn"), (_count, "a count", False)),
    **dict.fromkeys(("conversation", "class"), (lambda value: isinstance(value, str), "text", False)),
    **dict.fromkeys(("sent_s", ), (_number, "a number of seconds", False)),
    **dict.fromkeys(("first_s", "last_s", "failed_s"), (_number, "a number of seconds", True)),
    **dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens", "expected_prompt_tokens",
                     "theoretical_reuse"), (_count, "a count", True)),
}


def _obeys(found: Any, rules: dict[str, Rule], where: str) -> None:
    if not isinstance(found, dict):
        raise RecordError(f"{where} is {found!r:.40}, not an object")
    for name, (test, words, optional) in rules.items():
        value = found.get(name)
        if not test(value) and not (optional and value is None):
            raise RecordError(f"{where}: {name} is {value!r:.40}, not {words}")


def check(record: Record, where: str) -> None:
    """Whether a record's fields are what they should be, and its figures those of its samples. Those of other
    definitions than this tree's are not computed again.

    Args:
        where: the record's name, for messages.

    Raises:
        RecordError: they are not; it names the field.
    """
    _obeys(record, FIELDS, where)
    for place, sample in enumerate(record["samples"]):
        _obeys(sample, SAMPLE, f"{where}: samples[{place}]")
        times = [sample[name] for name in ("sent_s", "first_s", "last_s") if sample.get(name) is not None]
        if times != sorted(times):
            raise RecordError(f"{where}: samples[{place}]: sent_s, first_s and last_s are {times}, which do not ascend")
    if record["definitions"] != definitions.VERSION:
        return
    again = definitions.summary(record["samples"], record["wall_s"])
    for path in stats.FIGURES:
        kept, found = (stats.figure(summary, path) for summary in (record["summary"], again))
        if kept != found and (kept is None or found is None or not math.isclose(kept, found, rel_tol=SAME)):
            raise RecordError(f"{where}: its summary says {path} {kept}, its samples {found}: it is not the "
                              "record that was kept")
