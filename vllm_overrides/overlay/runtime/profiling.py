"""PROF_TRACE and PROF_MOE_SUMMARY: what they ask for, and how a worker's steps come to be watched."""
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.overlay.runtime.moe_summary import MoeSummary
from vllm.overlay.runtime.step_trace import StepTrace
from vllm.overlay.runtime.switches import count, switch

logger = init_logger(__name__)

TRACE, TRACE_DIR, MOE_SUMMARY = "PROF_TRACE", "PROF_TRACE_DIR", "PROF_MOE_SUMMARY"


@dataclass(frozen=True)
class Profiling:
    """trace_steps: to be recorded, 0 for none; folder: of the file; moe_summary: whether layers are measured."""
    trace_steps: int
    folder: Path
    moe_summary: bool

    @classmethod
    def asked(cls, eager: bool) -> "Profiling":
        """Returns what the environment asks for. eager: whether the layers are called in every step, not replayed.

        Raises:
            ValueError: a variable has a wrong value, or what it asks for cannot be had.
        """
        found = cls(count(TRACE), Path(os.environ.get(TRACE_DIR) or "/tmp"), bool(switch(MOE_SUMMARY)))
        if found.trace_steps and not (found.folder.is_dir() and os.access(found.folder, os.W_OK | os.X_OK)):
            raise ValueError(f"{TRACE_DIR}={found.folder}: no folder that can be written to")
        if found.moe_summary and not eager:
            raise ValueError(f"{MOE_SUMMARY}=1: it needs --enforce-eager: the pieces of a captured graph cannot be "
                             "told apart")
        return found

    def attach(self, runner: Any, rank: int) -> None:
        """Watches the steps of this model runner from now on, if anything is asked for."""
        watchers: list[StepTrace | MoeSummary] = []
        if self.moe_summary:
            layers = [module for module in runner.model.modules() if hasattr(type(module), "moe_summary")]
            if layers:
                summary = MoeSummary(rank, torch.cuda.synchronize if runner.device.type == "cuda" else None)
                for layer in layers:
                    layer.moe_summary = summary
                # Unlike atexit's, these functions are called in a process of multiprocessing, too.
                Finalize(runner, summary.end, exitpriority=1)
                watchers.append(summary)
            else:
                logger.warning("%s=1: the model has no routed experts, nothing is measured", MOE_SUMMARY)
        if self.trace_steps:
            watchers.append(StepTrace(self.trace_steps, self.folder, rank))
        if watchers:
            runner.execute_model = _watched(runner.execute_model, watchers)


def _watched(execute: Callable[..., Any], watchers: Sequence[StepTrace | MoeSummary]) -> Callable[..., Any]:
    def execute_model(*args: Any, **kwargs: Any) -> Any:
        for watcher in watchers:
            watcher.before_step()
        try:
            return execute(*args, **kwargs)
        finally:
            for watcher in watchers:
                watcher.after_step()

    return execute_model
