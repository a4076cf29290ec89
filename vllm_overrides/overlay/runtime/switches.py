"""Environment variables that are switched on by 1 or hold a count: what is neither is refused by its name."""
import os


def switch(variable: str) -> bool | None:
    """Returns what `variable` says: 1 is True, 0 is False; None where it is unset or empty.

    Raises:
        ValueError: anything else.
    """
    text = os.environ.get(variable, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{variable}={text}: must be 0, 1 or empty")
    return None if text == "" else text == "1"


def count(variable: str) -> int:
    """Returns the whole number that `variable` holds; 0 where it is unset or empty.

    Raises:
        ValueError: anything else.
    """
    text = os.environ.get(variable, "")
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{variable}={text}: must be a whole number or empty")
    return int(text or 0)
