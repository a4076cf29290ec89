"""Sequences: an empty delta is empty, pictures count as content, groups know their prefix hit and their parent, and
metadata carries orders about states and pictures."""
from collections.abc import Sequence as GenericSequence
from functools import cached_property
from typing import Any

from vllm import sequence_stock as _stock
from vllm.overlay.hybrid.state_orders import SequenceOrders
from vllm.overlay.pictures.orders import StepPictures
from vllm.overlay.pictures.prompt_pictures import PromptPictures
from vllm.overlay.prefix_cache.salt import salted_id


class Sequence(_stock.Sequence):
    """Stock's sequence."""

    @cached_property
    def pictures(self) -> PromptPictures | None:
        """The prompt's pictures, as the engine has put them into the inputs; None if it has none."""
        return self.inputs.get("pictures")

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """Token offsets, ascending, at which other prompts may part from this one (`prefix_cache.boundaries`)."""
        return self.inputs.get("boundaries") or ()

    @cached_property
    def cache_salt(self) -> str | None:
        """Only sequences with the same one share prefixes (`prefix_cache.salt`)."""
        return self.inputs.get("cache_salt")

    def hash_ids(self, start: int, end: int) -> list[int]:
        """Returns what identifies the content of the tokens [start, end): equal ids, equal KV and states. Token ids,
        but for placeholders of pictures (`vllm.overlay.pictures.hashing`) and the first token of a salted prompt."""
        if self.pictures is None:
            ids = list(self.get_token_ids()[start:end])
        else:
            ids = self.pictures.hash_ids(self.get_token_ids(), start, end)
        if self.cache_salt is not None and start == 0 and ids:
            ids[0] = salted_id(self.cache_salt, ids[0])
        return ids

    def get_output_token_ids_to_return(self, delta: bool) -> GenericSequence[int] | int:
        """Stock slices by [-0:] when nothing is new, and returns prompt and output as new tokens for every piece of a
        prompt."""
        if delta and self.get_output_len() == self._last_output_token_ids_offset:
            return []
        return super().get_output_token_ids_to_return(delta)


class SequenceGroup(_stock.SequenceGroup):
    """Stock's group.

    num_cached_tokens: prompt tokens taken from the prefix cache when the group was first admitted; None before. fanout:
    the request of several samples that this group is one sample of, or None.
    """
    num_cached_tokens: int | None = None
    fanout: Any | None = None


class SequenceGroupMetadata(_stock.SequenceGroupMetadata):
    """Stock's metadata.

    state_orders: None for models without recurrent state. state_moves: on the first group of a step, the checkpoints of
    recurrent state that the step moves to the host, (source slot, target slot, tag). step_pictures: on the first group
    of a step, what the whole step does about pictures; None where that is nothing.
    """
    state_orders: SequenceOrders | None = None
    state_moves: tuple[tuple[int, int, int], ...] = ()
    step_pictures: StepPictures | None = None


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
