"""The file of unfinished work: JSON values, one a line, the last of which a kill may have cut off."""
import fcntl
import json
from pathlib import Path
from typing import IO, Any


class Held(Exception):
    """Another process works on the file; one line."""


def hold(path: Path) -> IO[str]:
    """Makes the file if it is not there, and keeps others from it until the result is closed, or this process ends.

    Raises:
        OSError: it cannot be written.
        Held: another holds it.
    """
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise Held(f"{path}: a run that goes on now writes it; wait for its end, or give another folder or name"
                   ) from error
    return file


def add(path: Path, value: Any) -> None:
    """Appends one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def read(path: Path) -> list[Any]:
    """What was written. A last line without its end is taken off the file: what it was about is done again.

    Raises:
        OSError: the file cannot be read.
        ValueError: another line does not parse; it is named.
    """
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}: line {number} does not parse: {error}") from error
    if rest:
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return found
