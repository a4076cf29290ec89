"""What our server's log says that it has put aside for KV and for recurrent states."""
import re
from typing import Any

UNITS = {"MiB": 2**20, "GiB": 2**30}
SIZE = r"([\d.]+) (MiB|GiB)"
# One line each, of the engine when it is up.
LINES = {"kv": re.compile(rf"KV cache: \d+ tokens, {SIZE}"),
         "states": re.compile(rf"Recurrent state: \d+ slots of .*, {SIZE} in all"),
         "checkpoints": re.compile(rf"Checkpoints of recurrent state: \d+ on the device, {SIZE}; "
                                   rf"\d+ on the host, {SIZE}")}


def reserved(log: str) -> dict[str, Any] | None:
    """Bytes, as exactly as the log rounds them: {"kv", "states", "checkpoints", "bytes": all}; checkpoints are 0 where
    the log names none. None where it lacks another."""
    found: dict[str, Any] = {}
    for name, pattern in LINES.items():
        match = pattern.search(log)
        if match is None and name != "checkpoints":
            return None
        words = match.groups() if match else ()
        found[name] = round(sum(float(number) * UNITS[unit] for number, unit in zip(words[::2], words[1::2],
                                                                                    strict=True)))
    return {**found, "bytes": sum(found.values())}
