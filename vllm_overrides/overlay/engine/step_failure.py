"""A step that raises fails the requests that were in it; the engine goes on with the others. One that misses a
checkpoint was not begun, and fails nobody: its requests are computed again without it."""
from collections.abc import Sequence
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.outputs import RequestOutput, RequestOutputFactory
from vllm.overlay.hybrid.checkpoint_error import CheckpointError

logger = init_logger(__name__)


class StepFailed(RuntimeError):
    """Raised, or reported to each of `request_ids`, when a step that they were part of raised."""

    def __init__(self, message: str, request_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.request_ids: list[str] = list(request_ids)

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.request_ids)


class NonFiniteLogits(StepFailed):
    """Reported to a request whose logits cannot be sampled; the rest of its step went on. See `nonfinite`."""


class Refused(StepFailed, ValueError):
    """Reported to a request that cannot be served as it was asked for: its grammar cannot be compiled, or not be kept
    to. param: the field of the request that is at fault, where it is one."""

    param: str | None = None


class NothingAllowed(Refused):
    """Refused: what the request allows and what its grammar allows have no token in common."""

    param = "allowed_token_ids"


def can_go_on(engine: Any, virtual_engine: int) -> bool:
    """Returns whether it can be told who was in the step that raised, and whether the workers are still where the
    engine thinks.

    Of several ranks that exchange tensors one may be left waiting for another. What a scheduler leaves behind when it
    raises itself is unknown. And a device may refuse everything from then on.
    """
    return (_device_answers() and _ranks_are_together(engine) and not engine.scheduler_config.is_multi_step
            and engine.speculative_config is None and not engine.model_config.use_async_output_proc
            and engine.scheduler_contexts[virtual_engine].scheduler_outputs is not None)


def _device_answers() -> bool:
    """After an illegal access, or an assertion in a kernel, a CUDA context raises the same error for ever."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _ranks_are_together(engine: Any) -> bool:
    if engine.parallel_config.world_size == 1:
        return True
    # Only our executor of several ranks knows.
    not_exchanging = getattr(engine.model_executor, "ranks_are_together", None)
    return not_exchanging is not None and engine.parallel_config.pipeline_parallel_size == 1 and not_exchanging()


def abandon_step(engine: Any, virtual_engine: int, error: Exception) -> StepFailed:
    """Takes everything that was in the failed step out of the engine and returns the error for those requests."""
    context = engine.scheduler_contexts[virtual_engine]
    scheduler = engine.scheduler[virtual_engine]
    outputs = context.scheduler_outputs
    groups = [scheduled.seq_group for scheduled in outputs.scheduled_seq_groups] + list(outputs.ignored_seq_groups)
    failed = list(dict.fromkeys(engine.fanouts.parent_id(group.request_id) for group in groups))
    logger.error("A step failed, and with it requests %s", ", ".join(failed), exc_info=error)
    scheduler.step_failed()
    engine.abort_request([group.request_id for group in groups] + failed)
    scheduler.free_finished_seq_groups()
    _forget_outputs(context)
    return StepFailed(f"the step that computed this request failed: {type(error).__name__}: {error}", failed)


def recompute_step(engine: Any, virtual_engine: int, error: CheckpointError) -> list[RequestOutput]:
    """Puts everything that was in the step back to be computed again, from checkpoints that the workers have.

    Returns the outputs of requests that are over without having been computed, as stock's step would have.
    """
    context = engine.scheduler_contexts[virtual_engine]
    scheduler = engine.scheduler[virtual_engine]
    groups = [scheduled.seq_group for scheduled in context.scheduler_outputs.scheduled_seq_groups]
    ignored = list(context.scheduler_outputs.ignored_seq_groups)
    logger.warning("A step begins anew, and its requests without what they had restored (%s): %s",
                   ", ".join(group.request_id for group in groups), error)
    scheduler.cache_stats.failures += 1
    scheduler.step_failed()
    scheduler.drop_checkpoints(error.tags)
    scheduler.recompute(groups)
    _forget_outputs(context)
    outputs = [RequestOutputFactory.create(group, use_cache=engine.use_cached_outputs) for group in ignored]
    outputs = [output for output in outputs if output is not None]
    scheduler.free_finished_seq_groups()
    if outputs and engine.process_request_outputs_callback is not None:
        engine.process_request_outputs_callback(outputs)
    return outputs


def _forget_outputs(context: Any) -> None:
    context.output_queue.clear()
    context.request_outputs.clear()
    context.scheduler_outputs = None
