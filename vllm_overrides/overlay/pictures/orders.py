"""Orders about pictures, from the scheduler to the workers: the same on every rank."""
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm.overlay.pictures.positions import PictureLayout


class NewPicture(NamedTuple):
    """A picture that no rank holds yet. key: its digest. grid, pixels: as in `Picture`. tokens: embeddings that it must
    give."""
    key: bytes
    grid: tuple[int, int]
    pixels: torch.Tensor
    tokens: int


class Placement(NamedTuple):
    """Tokens row .. row + length - 1 of the step are embeddings first .. first + length - 1 of picture `key`."""
    row: int
    key: bytes
    first: int
    length: int


class PictureOrders(NamedTuple):
    """All orders of one step.

    compute: pictures that this step needs first, in the order of the rows. place: what the model's rows take. keep:
    keys whose embeddings a later step needs; all others go, before this step if it does not place them, else after it.
    """
    compute: Sequence[NewPicture]
    place: Sequence[Placement]
    keep: frozenset[bytes]

    def without_pixels(self) -> tuple["PictureOrders", torch.Tensor | None]:
        """Returns the orders with empty pixels and the pixels of all pictures in one tensor (None: no new picture).

        Between ranks, tensors travel as they are and everything else is pickled.
        """
        if not self.compute:
            return self, None
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        return (self._replace(compute=[new._replace(pixels=empty) for new in self.compute]),
                torch.cat([new.pixels for new in self.compute]))

    def with_pixels(self, pixels: torch.Tensor | None) -> "PictureOrders":
        """The reverse of `without_pixels`."""
        if pixels is None:
            return self
        parts = pixels.split([new.grid[0] * new.grid[1] for new in self.compute])
        return self._replace(compute=[new._replace(pixels=part)
                                      for new, part in zip(self.compute, parts, strict=True)])


class StepPictures(NamedTuple):
    """What the scheduler tells the driver about the pictures of one step; it rides on the step's first group.

    layouts: (index of the row, its layout) of the rows whose prompt has pictures. orders: None if ranks have nothing to
    do.
    """
    layouts: Sequence[tuple[int, PictureLayout]]
    orders: PictureOrders | None

    def positions(self, seq_lens: Sequence[int], query_lens: Sequence[int]) -> torch.Tensor:
        """Returns int64 [3, T], on the CPU: the rotary positions of a step's tokens. Row i computes the last
        query_lens[i] of its first seq_lens[i] tokens."""
        layouts = dict(self.layouts)
        plain = PictureLayout((), 1)
        return torch.cat([layouts.get(row, plain).positions(end - count, end)
                          for row, (end, count) in enumerate(zip(seq_lens, query_lens, strict=True))], dim=1)
