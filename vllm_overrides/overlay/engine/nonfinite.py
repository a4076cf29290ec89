"""Logits that are not finite fail their request, with an error that says where; they never become a token.

Three places work together. `watch` looks at the model's logits before masks and penalties touch them (logits
processor). `mark` puts a `FailedOutput` in the place of what was sampled from bad rows, once sampling is over (model
runner). `take_out` removes the marked requests from the engine (engine); the others of the step are not disturbed.

A row is bad if its largest entry is not finite: that is one reduction, and right for all three cases, because the
largest of a row is NaN if any entry is, +inf if any is, and -inf only if all are. Single entries of -inf are legal.

The rows' maxima travel to the host while sampling runs, which waits for the device itself before it returns; they have
arrived by then, so no step waits once more. Steps whose tokens stay on the device (multi-step scheduling) are not
checked.
"""
from collections.abc import Sequence
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.overlay.engine.step_failure import NonFiniteLogits, StepFailed
from vllm.overlay.hybrid import StateStep
from vllm.sequence import CompletionSequenceGroupOutput

logger = init_logger(__name__)


class FailedOutput(CompletionSequenceGroupOutput):
    """In the place of a group's output: it has no samples. reason: what the client is told. slot: of its state, or
    None. failure: the class of the error, a StepFailed."""
    reason: str = ""
    slot: int | None = None
    failure: Any = NonFiniteLogits


def watch(logits: torch.Tensor, sampling_metadata: Any) -> None:
    """Notes on the step's SamplingMetadata which rows are finite. logits: [T, V] of any float dtype, as computed."""
    peaks = logits.amax(dim=-1).to("cpu", non_blocking=True)
    arrived = None
    if logits.is_cuda:
        arrived = torch.cuda.Event()
        arrived.record()
    sampling_metadata.logit_peaks = (peaks, arrived)


def is_watching(sampling_metadata: Any) -> bool:
    """Whether this step's logits are there: from then on a step is this rank's alone."""
    return hasattr(sampling_metadata, "logit_peaks")


def mark(outputs: Any, sampling_metadata: Any, step: StateStep | None) -> None:
    """Replaces the outputs of groups with bad rows by FailedOutputs.

    outputs: what the step returned on this rank, one SamplerOutput in a list; other ranks than the first sampled
    nothing and are left alone. step: where the rows' states are, or None.
    """
    peaks, arrived = getattr(sampling_metadata, "logit_peaks", (None, None))
    if peaks is None or sampling_metadata.skip_sampler_cpu_output:
        return
    if arrived is not None:
        arrived.synchronize()
    bad = set((~torch.isfinite(peaks)).nonzero().flatten().tolist())
    if not bad:
        return
    for index, group in enumerate(sampling_metadata.seq_groups):
        position = _first_bad_position(group, bad)
        if position is not None:
            outputs[0].outputs[index] = FailedOutput([], None, f"non-finite logits at token position {position}",
                                                     None if step is None else int(step.live_slots[index]))


def _first_bad_position(group: Any, bad: set[int]) -> int | None:
    """Place in its sequence, from 0, of the first token of a SequenceGroupToSample whose logits are bad."""
    for offset, row in enumerate(group.prompt_logprob_indices):
        if row in bad:
            return group.seq_len - group.query_len + offset
    for seq_id, row in zip(group.seq_ids, group.sample_indices, strict=False):     # Or none is sampled.
        if row in bad:
            return group.seq_len - 1 if group.is_prompt else group.seq_data[seq_id].get_len() - 1
    return None


def _where(engine: Any, slot: int) -> str:
    """Where the state is bad that a request's last step left in `slot`. A fault in one rank's part of a layer is in
    every rank's part of the next, so all are asked; the asynchronous engine, which cannot wait for them, asks its own.
    """
    executor = engine.model_executor
    if hasattr(executor, "_run_workers") and not hasattr(executor, "execute_model_async"):
        executor.stop_remote_worker_execution_loop()
        found = executor._run_workers("first_nonfinite_state", slot)
    else:
        found = [executor.driver_worker.first_nonfinite_state(slot)]
    bad = [(ordinal, rank) for rank, ordinal in enumerate(found) if ordinal is not None]
    if not bad:
        return "no non-finite recurrent state"
    kinds = engine.model_config.hf_config.layers_block_type
    ordinal, rank = min(bad)
    layer = [layer for layer, kind in enumerate(kinds) if kind == "linear_attention"][ordinal]
    return f"first seen in the recurrent state of layer {layer}" + (f", rank {rank}" if len(found) > 1 else "")


def take_out(engine: Any, outputs: Sequence[Any], scheduled_groups: Sequence[Any]) -> list[StepFailed]:
    """Takes requests with a FailedOutput out of the engine, with all their samples, and returns an error for each.

    outputs: of one step, before the engine has processed them; asked a second time about a step it finds nothing to do.
    What requests with bad logits have computed, or read from the prefix cache, is not used again: the fault may have
    come from there. Who could not be kept to a grammar has computed as well as anybody.
    """
    failed: dict[str, StepFailed] = {}
    aborted = []
    for output, scheduled in zip(outputs[0].outputs if outputs else (), scheduled_groups, strict=False):
        group = scheduled.seq_group
        if isinstance(output, FailedOutput) and not group.is_finished():
            request_id = engine.fanouts.parent_id(group.request_id)
            where = "" if output.slot is None else f" ({_where(engine, output.slot)})"
            failed.setdefault(request_id, output.failure(output.reason + where, [request_id]))
            aborted.append(group.request_id)
            if output.failure is NonFiniteLogits:
                for scheduler in engine.scheduler:
                    scheduler.distrust(group)
    if failed:
        engine.abort_request([*aborted, *failed])
    for request_id, failure in failed.items():
        logger.error("Request %s failed: %s", request_id, failure)
    return list(failed.values())
