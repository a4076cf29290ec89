"""What the model reads about the pictures of the rows that it is running, set around one forward pass."""
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PictureStep:
    """Rows of one forward pass whose embeddings are those of pictures.

    placements: (row, embeddings [count, hidden] on the model's device and in its dtype): the embeddings of the tokens
    row .. row + count - 1 of the step, in place of what their placeholder ids would give. Rows of different placements
    never overlap.
    """
    placements: tuple[tuple[int, torch.Tensor], ...]

    def place(self, embeddings: torch.Tensor) -> None:
        """Overwrites the placeholders' rows of `embeddings`, [T, hidden]."""
        for row, rows in self.placements:
            embeddings[row:row + rows.shape[0]] = rows


_current: PictureStep | None = None


def get_picture_step() -> PictureStep | None:
    """Returns the step that is running; None outside a step and where no row is a picture's."""
    return _current


@contextmanager
def set_picture_step(step: PictureStep | None) -> Iterator[None]:
    """Makes `step` what `get_picture_step` returns while the context lasts."""
    global _current
    before = _current
    _current = step
    try:
        yield
    finally:
        _current = before
