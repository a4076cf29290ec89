"""Constraints in a step: masks over the logits of the rows that have one, and the requests whose grammar failed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from vllm.overlay.engine.nonfinite import FailedOutput
from vllm.overlay.engine.step_failure import NothingAllowed, Refused
from vllm.overlay.grammar.follower import Follower
from vllm.overlay.kernels.token_mask import apply_token_mask
from vllm.utils import is_pin_memory_available


def constrain(logits: torch.Tensor, sampling_metadata: Any) -> None:
    """Takes what the constraints of a step's sequences forbid out of their logits, in place; other rows are not
    touched.

    logits: [T, V] as computed. sampling_metadata: stock's; a group's ``sampling_params.follower`` is its Follower.
    """
    found: list[tuple[int, Follower]] = []
    for group in sampling_metadata.seq_groups or ():
        follower = getattr(group.sampling_params, "follower", None)
        if follower is None or not group.do_sample:
            continue
        (seq_id, ), (row, ) = group.seq_ids, group.sample_indices
        follower.follow(group.seq_data[seq_id].output_token_ids_array)
        found.append((row, follower))
    if not found:
        return
    buffer = _buffer(len(found), -(-logits.shape[1] // 32), logits.is_cuda)
    masks = buffer.numpy().view(np.uint32)
    _compute([(follower, place) for place, (_, follower) in enumerate(found)], masks)
    wanted = [place for place, (_, follower) in enumerate(found) if follower.finish(masks[place])]
    if wanted:
        chosen = buffer[:len(found)] if len(wanted) == len(found) else buffer[wanted]
        apply_token_mask(logits, chosen, [found[place][0] for place in wanted])


def mark(outputs: Any, sampling_metadata: Any) -> None:
    """Replaces the outputs of groups whose follower has failed by FailedOutputs. outputs: as in ``nonfinite.mark``."""
    for index, group in enumerate(getattr(sampling_metadata, "seq_groups", None) or ()):
        follower = getattr(group.sampling_params, "follower", None)
        if follower is not None and follower.failed is not None:
            failure = NothingAllowed if follower.narrowed else Refused
            outputs[0].outputs[index] = FailedOutput([], None, follower.failed, failure=failure)


def _compute(followers: list[tuple[Follower, int]], masks: np.ndarray[Any, Any]) -> None:
    """Masks of the sequences that are inside their grammar. masks: [R, ceil(V / 32)] uint32."""
    matchers = [(follower.matcher, place) for follower, place in followers if follower.matcher is not None]
    if matchers:
        # The library counts the vocabulary in words, too, and refuses a row of another length.
        _executor().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.shape[1] * 4, masks.shape[0])


@functools.lru_cache(maxsize=1)
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor()


@functools.lru_cache(maxsize=4)
def _pages(rows: int, words: int, pinned: bool) -> torch.Tensor:
    return torch.empty(rows, words, dtype=torch.int32, pin_memory=pinned and is_pin_memory_available())


def _buffer(rows: int, words: int, on_card: bool) -> torch.Tensor:
    """[R, words] int32. The same memory in every step: sampling has waited for the copy of the last one."""
    return _pages(-(-rows // 16) * 16, words, on_card)[:rows]
