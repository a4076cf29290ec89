"""Random generators of seeded requests across a preemption.

Stock makes a request's generator anew in every step that computes part of its prompt. A preempted request computes its
prompt again
after it has drawn tokens, and would draw the same random numbers a second time: other tokens than without the
preemption.
"""
from collections.abc import Sequence
from typing import Any

import torch


def generators_in_use(generators: dict[str, torch.Generator], metadata: Sequence[Any]) -> dict[int, torch.Generator]:
    """Returns group index -> generator for the seeded groups of a step that recompute their prompt after having
    sampled.

    metadata: the step's SequenceGroupMetadata, before stock prepares the sampling.
    """
    return {index: generators[group.request_id] for index, group in enumerate(metadata)
            if group.is_prompt and group.sampling_params is not None and group.sampling_params.seed is not None
            and group.request_id in generators and any(data.get_output_len() for data in group.seq_data.values())}


def put_back(kept: dict[int, torch.Generator], generators: dict[str, torch.Generator], metadata: Sequence[Any],
             sampling_metadata: Any) -> None:
    """Replaces the generators that stock has just made for those groups by the ones they were using."""
    for index, generator in kept.items():
        generators[metadata[index].request_id] = generator
        sampling_metadata.seq_groups[index].generator = generator
