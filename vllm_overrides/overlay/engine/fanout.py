"""n and best_of: one request of several samples is served as several requests of one sample.

Stock makes n sequences of one group: they need n places at once (more than max_num_seqs never run, and block the
queue), cannot be preempted by recomputation, and would have to fork recurrent state. Here every sample is a request of
its own in the scheduler, at most `limit` of them at a time; whoever asked sees one request with n completions.
"""
import copy
import sys
from collections import deque
from collections.abc import Callable

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams


class FanOut:
    """A request of several samples.

    request_id: the one that the client knows. waiting: samples not yet given to the scheduler. running: request ids of
    those that are.
    give: called with the id of a sample to put it into the scheduler.
    """
    give: Callable[[str], None]

    def __init__(self, request_id: str, params: SamplingParams, limit: int) -> None:
        """params: n is the number of samples to draw (stock puts best_of there), _real_n how many to return. limit: how
        many may be with the scheduler at a time."""
        self.request_id = request_id
        self.samples = params.n
        self.returned = params._real_n or params.n
        self.limit = limit
        self.waiting: deque[int] = deque(range(params.n))
        self.running: dict[str, int] = {}
        self._params = params
        self._finished = 0
        self._cached_tokens = sys.maxsize
        self._latest: dict[int, CompletionOutput] = {}
        self._hide_logprobs = False

    def take(self) -> str | None:
        """Returns the request id of the next sample to be given to the scheduler, or None if none is left or `limit`
        are there."""
        if not self.waiting or len(self.running) >= self.limit:
            return None
        index = self.waiting.popleft()
        child_id = f"{self.request_id}#{index}"
        self.running[child_id] = index
        return child_id

    def params(self, child_id: str) -> SamplingParams:
        """Returns the sampling parameters of one sample: its own seed (seed + index) and its own stateful logits
        processors."""
        index = self.running[child_id]
        params = self._params.clone()
        params.n, params.best_of, params._real_n = 1, None, None
        if params.seed is not None:
            params.seed += index
        if params.logits_processors:
            params.logits_processors = [processor.clone() if hasattr(processor, "clone") else processor
                                        for processor in params.logits_processors]
        if self.returned < self.samples and params.logprobs is None:
            # The best are chosen by their probability, which the sampler works out on demand only.
            params.logprobs = 0
            self._hide_logprobs = True
        return params

    @property
    def done(self) -> bool:
        """Whether every sample has finished."""
        return self._finished == self.samples

    def merge(self, child_id: str, output: RequestOutput) -> RequestOutput | None:
        """Turns the output of one sample into one of the whole request; None where there is nothing to say yet."""
        index = self.running[child_id]
        # Copies, because the engine writes a group's next output into the objects of the last one.
        merged, completion = copy.copy(output), copy.copy(output.outputs[0])
        completion.index = index
        if self._hide_logprobs:
            completion.logprobs = None
        if output.finished:
            del self.running[child_id]
            self._finished += 1
        merged.request_id = self.request_id
        merged.finished = self.done
        # Later samples find the prompt that the first one has computed: no work was saved for the request as a whole.
        self._cached_tokens = min(self._cached_tokens, output.num_cached_tokens or 0)
        merged.num_cached_tokens = self._cached_tokens
        kind = self._params.output_kind
        if kind == RequestOutputKind.DELTA:
            merged.outputs = [completion]
            return merged
        self._latest[index] = completion
        if kind == RequestOutputKind.FINAL_ONLY and not self.done:
            return None
        merged.outputs = self._ranked()
        return merged

    def _ranked(self) -> list[CompletionOutput]:
        if self.returned == self.samples:
            return [self._latest[index] for index in sorted(self._latest)]
        ranked = sorted(self._latest.values(), key=lambda completion: -(completion.cumulative_logprob or 0.0))
        best = ranked[:self.returned]
        if self.done:
            for index, completion in enumerate(best):
                completion.index = index
                if self._hide_logprobs:
                    completion.cumulative_logprob = None
        return best


class FanOuts:
    """The requests of several samples that an engine is serving."""

    def __init__(self) -> None:
        self._parents: dict[str, FanOut] = {}
        self._children: dict[str, FanOut] = {}

    def add(self, fanout: FanOut) -> None:
        """Raises ValueError if the id is in use."""
        if fanout.request_id in self._parents:
            raise ValueError(f"request {fanout.request_id} already exists")
        self._parents[fanout.request_id] = fanout

    def of_child(self, child_id: str) -> FanOut | None:
        """Returns the request that `child_id` is a sample of, or None."""
        return self._children.get(child_id)

    def admit(self) -> None:
        """Gives the scheduler every sample that may now go there, and forgets finished requests."""
        for fanout in list(self._parents.values()):
            while (child_id := fanout.take()) is not None:
                self._children[child_id] = fanout
                fanout.give(child_id)
            if fanout.done:
                self.drop(fanout.request_id)
        for child_id in [child for child, fanout in self._children.items() if child not in fanout.running]:
            del self._children[child_id]

    def drop(self, request_id: str) -> list[str]:
        """Forgets a request; returns the ids of its samples that are with the scheduler."""
        fanout = self._parents.pop(request_id, None)
        if fanout is None:
            return []
        for child_id in fanout.running:
            self._children.pop(child_id, None)
        return list(fanout.running)

    def parent_id(self, request_id: str) -> str:
        """Returns the id that the client knows."""
        fanout = self._children.get(request_id)
        return fanout.request_id if fanout is not None else request_id
