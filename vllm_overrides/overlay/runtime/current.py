"""What holds for one forward pass, for code that it cannot be handed to: the model's arguments are stock's."""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Current(Generic[T]):
    """A value set around a forward pass. A worker runs one at a time, so that one place is enough."""

    def __init__(self) -> None:
        self._value: T | None = None

    def get(self) -> T | None:
        """Returns what the innermost `set` gave; None outside."""
        return self._value

    @contextmanager
    def set(self, value: T | None) -> Iterator[None]:
        """Makes `value` what `get` returns while the context lasts."""
        before, self._value = self._value, value
        try:
            yield
        finally:
            self._value = before
