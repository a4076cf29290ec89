"""What the state of one sequence is made of."""
from typing import NamedTuple

import torch


class StateSpec(NamedTuple):
    """What one sequence's state is made of on this rank. A model that has such state returns it from
    `get_state_spec()`.

    num_layers: number of layers with state. conv_shape: (channels on this rank, convolution width - 1) of `conv_dtype`.
    recurrent_shape: (value heads on this rank, key size, value size), always float32.
    """
    num_layers: int
    conv_shape: tuple[int, int]
    conv_dtype: torch.dtype
    recurrent_shape: tuple[int, int, int]

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of one slot's recurrent states over all layers."""
        return self.num_layers * self.recurrent_shape[0] * self.recurrent_shape[1] * self.recurrent_shape[2] * 4

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        item = torch.empty((), dtype=self.conv_dtype).element_size()
        return self.recurrent_bytes + self.num_layers * self.conv_shape[0] * self.conv_shape[1] * item
