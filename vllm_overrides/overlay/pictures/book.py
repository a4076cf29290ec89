"""The scheduler's book of pictures: which of them the ranks hold, for whom, and what a step must compute and place."""
from collections.abc import Iterable
from typing import Any

from vllm.overlay.pictures.orders import NewPicture, PictureOrders, Placement, StepPictures


class PictureBook:
    """A picture is computed by the first step that needs one of its tokens, and held until the last of its tokens was
    computed, for every sequence that has begun it. It is known by its content: equal pictures are computed once as long
    as one of them is held. It never looks at memory: workers carry out its orders.

    Held are at most the pictures of one step and one per sequence in the middle of its prompt.
    """

    def __init__(self) -> None:
        # Key of a picture -> the (sequence, index of the picture in it) that are in the middle of it.
        self._held: dict[bytes, set[tuple[int, int]]] = {}
        # What the ranks hold after the last step; None if it is not known.
        self._at_ranks: frozenset[bytes] | None = frozenset()
        self._new: list[bytes] = []

    @property
    def num_held(self) -> int:
        """Pictures that ranks must hold for a later step."""
        return len(self._held)

    def step(self, rows: Iterable[tuple[Any, int, int]]) -> StepPictures | None:
        """Makes the orders of the step being scheduled; the next step starts from what this one leaves.

        rows: (sequence, start, count) in batch order: the row computes the tokens [start, start + count) of a
        `vllm.sequence.Sequence`. Returns None where no row has pictures and the ranks have nothing to do.
        """
        layouts, compute, place, at = [], [], [], 0
        for row, (seq, start, count) in enumerate(rows):
            prompt = seq.pictures
            if prompt is not None:
                layouts.append((row, prompt.layout))
                for index, first, end in prompt.overlapping(start, start + count):
                    picture = prompt.pictures[index]
                    if picture.digest not in self._held:
                        self._held[picture.digest] = set()
                        compute.append(NewPicture(picture.digest, picture.grid, picture.pixels,
                                                  prompt.num_tokens(index)))
                    place.append(Placement(at + picture.offset + first - start, picture.digest, first, end - first))
                    if end < prompt.num_tokens(index):
                        self._held[picture.digest].add((seq.seq_id, index))
                    else:
                        self._held[picture.digest].discard((seq.seq_id, index))
            at += count
        self._held = {key: users for key, users in self._held.items() if users}
        self._new = [new.key for new in compute]
        keep = frozenset(self._held)
        orders = PictureOrders(compute, place, keep) if place or keep != self._at_ranks else None
        self._at_ranks = keep
        return StepPictures(layouts, orders) if layouts or orders is not None else None

    def forget(self, seq_id: int) -> None:
        """The sequence needs nothing any more: it finished, was aborted, or is preempted and starts anew."""
        for key, users in list(self._held.items()):
            users -= {user for user in users if user[0] == seq_id}
            if not users:
                del self._held[key]

    def step_failed(self) -> None:
        """The last step raised, and its sequences will be aborted: what it was to compute may not be there."""
        for key in self._new:
            self._held.pop(key, None)
        self._new = []
        self._at_ranks = None
