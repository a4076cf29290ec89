"""Rotary position embedding on the first dimensions of each head, NeoX halves, optionally interleaved M-RoPE."""
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm.overlay.kernels.backend import Backends

backends = Backends("rope", (("native", "native"), ("torch", "torch_impl"), ("reference", "reference")))


class Rotation(NamedTuple):
    """The angles of a step's tokens: cos and sin, each [T, rotary_dim / 2] float32. Made once, used by every layer."""
    cos: torch.Tensor
    sin: torch.Tensor


class RotaryTable:
    """Turns positions into rotations: angle i of a token at position p is p * theta ** (-2 i / rotary_dim).

    Args:
        rotary_dim: rotated dimensions of each head, even, at most the head size (64 of 256 in the 35B model).
        theta: base of the frequencies.
        mrope_section: (t, h, w) counts, t + h + w = rotary_dim / 2, for models with three positions per token.
            Interleaved: angle i belongs to h if i % 3 == 1 and i < 3 h, to w if i % 3 == 2 and i < 3 w, else to t.

    Raises:
        ValueError: an odd rotary_dim, or sections that do not add up.
    """

    def __init__(self, rotary_dim: int, theta: float, mrope_section: Sequence[int] | None = None) -> None:
        if rotary_dim % 2 or rotary_dim < 2:
            raise ValueError(f"rope: rotary_dim {rotary_dim} is not even and positive")
        if mrope_section is not None and (len(mrope_section) != 3 or sum(mrope_section) != rotary_dim // 2):
            raise ValueError(f"rope: sections {list(mrope_section)} for {rotary_dim // 2} angles")
        self.rotary_dim = rotary_dim
        self.theta = float(theta)
        self.mrope_section = None if mrope_section is None else tuple(mrope_section)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
        self._inv_freq = 1.0 / self.theta**exponents
        self._axis = torch.tensor([self._axis_of(i) for i in range(rotary_dim // 2)], device="cpu")

    def _axis_of(self, angle: int) -> int:
        axis = angle % 3
        if self.mrope_section is None or axis == 0 or angle >= 3 * self.mrope_section[axis]:
            return 0
        return axis

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Returns the rotations of `positions`: integer [T], or [3, T] (t, h, w), on any device. float32.

        Raises:
            ValueError: [3, T] without sections. [T] with sections is fine: text has three equal positions.
        """
        if positions.dim() == 2 and (self.mrope_section is None or positions.shape[0] != 3):
            raise ValueError(f"rope: positions {tuple(positions.shape)} with sections {self.mrope_section}")
        if self._inv_freq.device != positions.device:
            self._inv_freq = self._inv_freq.to(positions.device)
            self._axis = self._axis.to(positions.device)
        where = positions.float()
        if where.dim() == 1:
            angles = where[:, None] * self._inv_freq
        else:
            angles = where.t()[:, self._axis] * self._inv_freq
        return Rotation(angles.cos(), angles.sin())


def apply_rope(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the pairs (x_i, x_{i + R/2}), i < R/2, of each head, R = rotary_dim; computed in float32.

    Args:
        q: [T, Hq, D]. k: [T, Hk, D], D >= R. float32, bfloat16 or float16; views are fine.
        rotation: `RotaryTable(...)(positions)` of the same T tokens.

    Returns:
        New contiguous q and k of their dtypes; dimensions from R on are copied as they are.
    """
    return backends.chosen().apply_rope(q, k, rotation.cos, rotation.sin)
