"""Sequences: an empty delta is empty, groups know their prefix hit and their parent, and metadata carries state
orders."""
from collections.abc import Sequence as GenericSequence
from typing import Any

from vllm import sequence_stock as _stock
from vllm.overlay.hybrid.state_orders import SequenceOrders


class Sequence(_stock.Sequence):
    """Stock's sequence."""

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
    """Stock's metadata; `state_orders` is None for models without recurrent state."""
    state_orders: SequenceOrders | None = None


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
