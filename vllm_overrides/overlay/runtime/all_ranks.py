"""What the ranks tell one another in a few numbers."""
from collections.abc import Sequence

import torch


def least(values: Sequence[int], world_size: int) -> list[int]:
    """Returns the least of each of `values` over all ranks of the world. Every rank must ask, with as many values; it
    waits for the others, on the host."""
    if world_size == 1:
        return list(values)
    from vllm.distributed.parallel_state import get_world_group

    # torch 2.1's gloo writes from a thread of its own, which may not write to inference tensors.
    with torch.inference_mode(False):
        found = torch.tensor(values, dtype=torch.int64, device="cpu")
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return [int(value) for value in found]
