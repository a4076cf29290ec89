"""The embeddings of pictures that one rank holds: from the step that computes them to the step that places the last of
their tokens."""
from typing import Any

import torch

from vllm.overlay.pictures.orders import PictureOrders
from vllm.overlay.pictures.picture_step import PictureStep


class PictureStore:
    """Carries out the scheduler's orders; raises, on every rank alike, where it cannot."""

    def __init__(self) -> None:
        self._embeddings: dict[bytes, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._embeddings)

    @property
    def nbytes(self) -> int:
        """Bytes of the embeddings held."""
        return sum(held.numel() * held.element_size() for held in self._embeddings.values())

    def begin(self, orders: PictureOrders, model: Any) -> PictureStep:
        """Computes the pictures that are new by `model.embed_pictures(pixels, grids)`, which returns one [tokens,
        hidden] per picture, and tells the model what to place.

        Raises:
            RuntimeError: scheduler and worker disagree: the model has no vision tower, a picture gives another number
                of embeddings than it has placeholders, or one that is to be placed was never computed.
        """
        embed = getattr(model, "embed_pictures", None)
        if embed is None:
            raise RuntimeError(f"orders about pictures for {type(model).__name__}, which has no vision tower")
        self._drop_all_but(orders.keep | {placement.key for placement in orders.place})
        if orders.compute:
            computed = embed([new.pixels for new in orders.compute], [new.grid for new in orders.compute])
            for new, embeddings in zip(orders.compute, computed, strict=True):
                if embeddings.shape[0] != new.tokens:
                    raise RuntimeError(f"a picture of {new.grid[0]} x {new.grid[1]} patches gave {embeddings.shape[0]} "
                                       f"embeddings for {new.tokens} placeholders")
                self._embeddings[new.key] = embeddings
        placements = []
        for row, key, first, length in orders.place:
            if key not in self._embeddings:
                raise RuntimeError(f"picture {key.hex()[:16]} is to be placed, but was not computed")
            rows = self._embeddings[key][first:first + length]
            if rows.shape[0] != length:
                raise RuntimeError(f"picture {key.hex()[:16]} has no embeddings {first} to {first + length - 1}")
            placements.append((row, rows))
        return PictureStep(tuple(placements))

    def end(self, orders: PictureOrders) -> None:
        """Lets go of what no later step needs. Called when the forward pass is over."""
        self._drop_all_but(orders.keep)
        for key, held in self._embeddings.items():
            if held.untyped_storage().nbytes() > held.numel() * held.element_size():
                # A slice of what was computed together would keep all of that alive.
                self._embeddings[key] = held.clone()

    def _drop_all_but(self, keys: frozenset[bytes] | set[bytes]) -> None:
        for key in [key for key in self._embeddings if key not in keys]:
            del self._embeddings[key]
