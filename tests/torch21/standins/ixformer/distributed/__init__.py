"""Collectives: the vendor's parallel_state.py takes the group from `create_ixformer_group_from_pg`."""
from __future__ import annotations

from typing import Any

import torch


def all_reduce(tensor: torch.Tensor, group: Any, async_op: bool) -> None:
    """In place, and done on return: on the card the stream orders it."""
    torch.distributed.all_reduce(tensor, group=group)
