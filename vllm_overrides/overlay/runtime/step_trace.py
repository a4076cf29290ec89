"""PROF_TRACE: what torch.profiler sees of a few steps of one rank, in a file for chrome://tracing or Perfetto."""
import os
import time
from pathlib import Path
from typing import Any

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

# Steps before the first recorded one: allocators grow and libraries choose their algorithms in them. In the last of
# them the profiler runs already, for it is slow at first.
WARM_UP = 5


class StepTrace:
    """Records `steps` steps of this process, once, and writes them to a new file in `folder`.

    A failure to write is logged, and ends no step.
    """

    def __init__(self, steps: int, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._steps = folder, rank, steps
        self._left = WARM_UP + steps
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        schedule = torch.profiler.schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1)
        self._profile = torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=self._write)
        self._started = False
        logger.info("PROF_TRACE: rank %d records %d steps after the first %d, for a file in %s; they are slower",
                    rank, steps, WARM_UP, folder)

    def before_step(self) -> None:
        """The profiler watches the thread that starts it: the one of the steps."""
        if not self._started:
            self._started = True
            self._profile.start()

    def after_step(self) -> None:
        """Counts the step; the last one takes as long as writing the file."""
        if self._left:
            self._left -= 1
            self._profile.step()
            if not self._left:
                self._profile.stop()

    def _write(self, profile: Any) -> None:
        began = time.monotonic()
        name = f"vllm_trace_rank{self._rank}_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}.json.gz"
        path = self._folder / name
        try:
            profile.export_chrome_trace(str(path))
            size = path.stat().st_size
        except (OSError, RuntimeError) as error:
            logger.error("PROF_TRACE: the trace of rank %d cannot be written to %s: %s", self._rank, path, error)
            return
        logger.info("PROF_TRACE: %d steps of rank %d are in %s (%.1f MB, written in %.1f s)", self._steps, self._rank,
                    path, size / 1e6, time.monotonic() - began)
