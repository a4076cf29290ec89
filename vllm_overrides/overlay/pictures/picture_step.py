"""What the model reads about the pictures of the rows that it is running, set around one forward pass."""
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from vllm.overlay.runtime.current import Current


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


_current: Current[PictureStep] = Current()


def get_picture_step() -> PictureStep | None:
    """Returns the step that is running; None outside a step and where no row is a picture's."""
    return _current.get()


def set_picture_step(step: PictureStep | None) -> AbstractContextManager[None]:
    """Makes `step` what `get_picture_step` returns while the context lasts."""
    return _current.set(step)
