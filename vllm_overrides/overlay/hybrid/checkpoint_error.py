"""Scheduler and workers disagree about a checkpoint."""
from collections.abc import Sequence
from typing import Any


class CheckpointError(RuntimeError):
    """Raised by the first rank before anything of a step is written on any rank: a slot that the step was to restore
    or to move does not hold, on some rank, what the scheduler means.

    tags: of those checkpoints. The step can be computed once the scheduler has forgotten them.
    """

    def __init__(self, message: str, tags: Sequence[int]) -> None:
        super().__init__(message)
        self.tags: list[int] = list(tags)

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.tags)
