"""The engine: stock's, with recurrent state planned, several samples as several requests, grammars compiled beside it,
and a failed step survived."""
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.engine import llm_engine_stock as _stock
from vllm.logger import init_logger
from vllm.outputs import EmbeddingRequestOutput, RequestOutput
from vllm.overlay.engine import nonfinite
from vllm.overlay.engine.fanout import FanOut, FanOuts
from vllm.overlay.engine.step_failure import Refused, StepFailed, abandon_step, can_go_on, recompute_step
from vllm.overlay.grammar.waiting import Grammars
from vllm.overlay.hybrid import CheckpointError
from vllm.overlay.hybrid.plan import plan_slots
from vllm.overlay.pictures.book import PictureBook
from vllm.overlay.pictures.picture import PictureSettings
from vllm.overlay.pictures.prompt_pictures import read_pictures
from vllm.overlay.prefix_cache.boundaries import take_boundaries
from vllm.overlay.prefix_cache.salt import take_salt
from vllm.overlay.prefix_cache.stats import total
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.sequence import SequenceGroup

logger = init_logger(__name__)

# An engine that has only grammars to wait for looks for new requests so often.
_PATIENCE_S = 0.005


class LLMEngine(_stock.LLMEngine):
    """See docs/engine.md. `on_step_failure`, if set, is told of a failed step's requests; otherwise `step` raises
    `StepFailed`."""

    on_step_failure: Callable[[StepFailed], None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.fanouts = FanOuts()
        # Of requests that failed alone in a step whose outputs were returned; raised by the next ones.
        self._failures: deque[StepFailed] = deque()
        # Of checkpoints that the workers missed, and the scheduler should have forgotten.
        self._missed: set[int] = set()
        plan_slots(kwargs["model_config"], kwargs["cache_config"], kwargs["scheduler_config"],
                   kwargs["parallel_config"])
        self.picture_settings = PictureSettings.of(kwargs["model_config"].hf_config)
        super().__init__(*args, **kwargs)
        slot_bytes = getattr(self.cache_config, "state_slot_bytes", 0) * self.parallel_config.tensor_parallel_size
        for scheduler in self.scheduler:
            scheduler.cache_stats.slot_bytes = slot_bytes
            if self.picture_settings is not None:
                scheduler.pictures = PictureBook()
        self.grammars = Grammars(self)

    def _add_processed_request(self, request_id: str, processed_inputs: Any, params: SamplingParams | PoolingParams,
                               *args: Any, **kwargs: Any) -> None:
        processed_inputs = take_salt(take_boundaries(processed_inputs))
        if not self.model_config.is_multimodal_model:
            limit = getattr(self.model_config, "max_pictures", None)
            pictures = read_pictures(processed_inputs, self.picture_settings, limit)
            # Stock's own way, which maps what it finds in multi_modal_data anew in every step, is not taken.
            processed_inputs = {**processed_inputs, "multi_modal_data": None, "pictures": pictures}
        self.grammars.hold(request_id, params,
                           lambda params: self._add_samples(request_id, processed_inputs, params, *args, **kwargs))

    def _add_samples(self, request_id: str, processed_inputs: Any, params: SamplingParams | PoolingParams,
                     *args: Any, **kwargs: Any) -> None:
        if not isinstance(params, SamplingParams) or params.n == 1:
            super()._add_processed_request(request_id, processed_inputs, params, *args, **kwargs)
            return
        add = super()._add_processed_request
        fanout = FanOut(request_id, params, self.scheduler_config.max_num_seqs)
        fanout.give = lambda child_id: add(child_id, processed_inputs, fanout.params(child_id), *args, **kwargs)
        self.fanouts.add(fanout)
        try:
            self.fanouts.admit()
        except Exception:
            self.abort_request(request_id)
            raise

    def _create_sequence_group_with_sampling(self, request_id: str, seq: Any, sampling_params: SamplingParams,
                                             *args: Any, **kwargs: Any) -> SequenceGroup:
        # Stock turns the list into a logits processor and forgets it.
        allowed = None if sampling_params.allowed_token_ids is None else set(sampling_params.allowed_token_ids)
        group = super()._create_sequence_group_with_sampling(request_id, seq, sampling_params, *args, **kwargs)
        params = group.sampling_params
        if allowed and params.min_tokens and allowed <= params.all_stop_token_ids:
            raise ValueError("allowed_token_ids holds only tokens that end the answer, which min_tokens forbids")
        self.grammars.follow(params, allowed)
        group.fanout = self.fanouts.of_child(request_id)
        return group

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Aborts requests, with all their samples. Unknown ids are ignored."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self.grammars.drop(ids)
        super().abort_request(ids + [child for one in ids for child in self.fanouts.drop(one)])

    def _process_model_outputs(self, ctx: _stock.SchedulerContext, request_id: str | None = None) -> None:
        self._note_success()
        if ctx.output_queue:
            outputs, _, scheduler_outputs, *_ = ctx.output_queue[0]
            self._fail_marked(outputs, scheduler_outputs.scheduled_seq_groups)
        super()._process_model_outputs(ctx, request_id)
        self.fanouts.admit()

    def _advance_to_next_step(self, output: Any, seq_group_metadata_list: Any, scheduled_seq_groups: Any) -> None:
        # Outputs are processed after the next step is scheduled (on a card): who failed must not be in it.
        self._note_success()
        self._fail_marked([output], scheduled_seq_groups)
        super()._advance_to_next_step(output, seq_group_metadata_list, scheduled_seq_groups)

    def _note_success(self) -> None:
        """Called before anything of the step can finish, or fail alone, and give its blocks away."""
        for scheduler in self.scheduler:
            scheduler.step_succeeded()

    def _fail_marked(self, outputs: Sequence[Any], scheduled_seq_groups: Sequence[Any]) -> None:
        for failure in nonfinite.take_out(self, outputs, scheduled_seq_groups):
            self._report(failure)

    def _report(self, failure: StepFailed) -> None:
        if self.on_step_failure is None:
            self._failures.append(failure)
        else:
            self.on_step_failure(failure)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do, to raise or to wait for."""
        return bool(self._failures) or bool(self.grammars) or super().has_unfinished_requests()

    def _add_compiled(self) -> bool:
        """Adds the requests whose grammar is ready. Returns whether there is nothing to compute until more are."""
        for request_id, add in self.grammars.due():
            try:
                add()
            except Exception as error:
                self.abort_request(request_id)
                if isinstance(error, ValueError):
                    self._report(Refused(str(error), [request_id]))
                else:
                    logger.exception("request %s could not be added", request_id)
                    self._report(StepFailed(f"it could not be added: {type(error).__name__}: {error}", [request_id]))
        return bool(self.grammars) and not super().has_unfinished_requests()

    def step(self) -> list[RequestOutput | EmbeddingRequestOutput]:
        """Stock's step.

        Raises:
            StepFailed: the step raised, its requests are gone and the engine can go on; not if `on_step_failure` is
            set.
            NonFiniteLogits: a request failed alone in an earlier step, whose other outputs were returned; nothing was
            computed now.
        """
        if self._add_compiled():
            self.grammars.wait(_PATIENCE_S)
            return []
        if self._failures:
            raise self._failures.popleft()
        self._before_step(0)
        try:
            return super().step()
        except Exception as error:
            return self._survive(0, error, self._let_ranks_rest)

    def _before_step(self, virtual_engine: int) -> None:
        if not self.scheduler_config.is_multi_step:
            # So that a failure tells whether this step had been scheduled.
            self.scheduler_contexts[virtual_engine].scheduler_outputs = None

    def _survive(self, virtual_engine: int, error: Exception,
                 and_then: Callable[[], None] | None = None) -> list[RequestOutput | EmbeddingRequestOutput]:
        if not can_go_on(self, virtual_engine):
            raise error
        if isinstance(error, CheckpointError) and self._missed.isdisjoint(error.tags):
            self._missed.update(error.tags)
            return recompute_step(self, virtual_engine, error)
        failure = abandon_step(self, virtual_engine, error)
        if and_then is not None:
            and_then()
        if self.on_step_failure is None:
            raise failure from error
        self.on_step_failure(failure)
        return []

    def reset_prefix_cache(self) -> None:
        """Forgets every prefix that was computed; running requests go on."""
        for scheduler in self.scheduler:
            scheduler.reset_prefix_cache()
        # Otherwise metrics would show what is gone until the next step.
        self.do_log_stats()

    def _get_stats(self, *args: Any, **kwargs: Any) -> _stock.Stats:
        stats = super()._get_stats(*args, **kwargs)
        stats.prefix_cache = total(scheduler.cache_stats for scheduler in self.scheduler)
        return stats

    def _let_ranks_rest(self) -> None:
        """What stock does at the end of a step after which nothing is left: other ranks stop asking for the next."""
        if not super().has_unfinished_requests():
            self.model_executor.stop_remote_worker_execution_loop()


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
