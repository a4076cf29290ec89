"""The scheduler: stock's, with prefix hits and checkpoints of recurrent state, preemption always by recomputation, and
the books of state slots and pictures."""
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from vllm.core import scheduler_stock as _stock
from vllm.overlay.engine import places
from vllm.overlay.engine.large_output import LargeOutputs
from vllm.overlay.hybrid.slots import SlotTable
from vllm.overlay.hybrid.state_orders import ZERO
from vllm.overlay.pictures.book import PictureBook
from vllm.overlay.prefix_cache.block_manager import ComputedBlockManager
from vllm.overlay.prefix_cache.coordinator import PrefixCache
from vllm.overlay.prefix_cache.stats import PrefixCacheStats
from vllm.sequence import Sequence, SequenceGroup, SequenceGroupMetadata, SequenceStatus
from vllm.utils import Device

# How many waiting groups are looked at in a step, beyond as many as can run: some of them may wait for others.
_WINDOW = 8


class Scheduler(_stock.Scheduler):
    """See docs/engine.md for how a step flows. Groups have one sequence each (`vllm.overlay.engine.fanout` sees to
    it)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Swapping needs room that nobody reserves, and recurrent state cannot be swapped; stock ends the engine over
        # it.
        self.user_specified_preemption_mode = "recompute"
        num_slots = getattr(self.cache_config, "num_state_slots", 0)
        self.slots: SlotTable | None = SlotTable(num_slots) if num_slots else None
        self.cache_stats = PrefixCacheStats()
        self.prefixes = self._make_prefix_cache(num_slots)
        # Set by the engine of a model that takes pictures.
        self.pictures: PictureBook | None = None
        self._preempted = False
        self._large_outputs = LargeOutputs()

    def _make_prefix_cache(self, num_slots: int) -> PrefixCache | None:
        """Returns None where prompts are not cut, and where there is state but no room for checkpoints of it."""
        cache = self.cache_config
        device = getattr(cache, "num_checkpoint_slots", 0)
        if (self._manager is None or not cache.enable_prefix_caching or (num_slots and not device)
                or not self.scheduler_config.chunked_prefill_enabled or self.scheduler_config.is_multi_step):
            return None
        return PrefixCache(self._manager, self.cache_stats, num_slots, device,
                           getattr(cache, "num_host_checkpoint_slots", 0))

    @property
    def _manager(self) -> ComputedBlockManager | None:
        return self.block_manager if isinstance(self.block_manager, ComputedBlockManager) else None

    def schedule(self) -> tuple[list[SequenceGroupMetadata], _stock.SchedulerOutputs, bool]:
        self.step_succeeded()
        self._preempted = False
        if self.scheduler_config.policy != "priority":
            self._large_outputs.arrange(self)
        held_back = places.share(self)
        try:
            metadata, outputs, allow_async = super().schedule()
        finally:
            self.waiting.extend(held_back)
        for group in metadata:
            if group.is_prompt:
                _forget_known_prompt_logprobs(group)
        captures = self.prefixes.scheduled(_rows(outputs.scheduled_seq_groups)) if self.prefixes is not None else {}
        if self.slots is not None:
            for group in metadata:
                (seq_id, ) = group.seq_data
                group.state_orders = self.slots.orders(seq_id, captures.get(seq_id, ()))
            if self.prefixes is not None and metadata:
                metadata[0].state_moves = self.prefixes.moves
        if self.pictures is not None and metadata:
            metadata[0].step_pictures = self.pictures.step(_rows(outputs.scheduled_seq_groups))
        return metadata, outputs, allow_async

    def step_succeeded(self) -> None:
        """Says that the last scheduled step was computed. Called before its sequences can be freed."""
        if self.prefixes is not None:
            self.prefixes.step_succeeded()
        elif self._manager is not None:
            self._manager.step_succeeded()

    def step_failed(self) -> None:
        """Says that the last scheduled step was not computed. Its groups must be aborted, or `recompute`d."""
        if self.prefixes is not None:
            self.prefixes.step_failed()
        elif self._manager is not None:
            self._manager.step_failed()
        if self.pictures is not None:
            self.pictures.step_failed()

    def recompute(self, seq_groups: Iterable[SequenceGroup]) -> None:
        """Puts running groups back to the head of the queue, in their order, to be computed again."""
        for seq_group in reversed(list(seq_groups)):
            self.running.remove(seq_group)
            self._forget_partial_logprobs(seq_group)
            self._preempt_by_recompute(seq_group)
            self.waiting.appendleft(seq_group)

    def distrust(self, seq_group: SequenceGroup) -> None:
        """Keeps all that a running group has computed or reused from being reused again. It must be aborted next."""
        for seq in seq_group.get_seqs():
            if self.prefixes is not None:
                self.prefixes.distrust(seq)
            elif self._manager is not None:
                self._manager.distrust(seq)

    def drop_checkpoints(self, tags: Iterable[int]) -> None:
        """Forgets checkpoints that a worker does not hold. Called after `step_failed`."""
        if self.prefixes is not None:
            self.prefixes.store.drop_tags(tags)

    def reset_prefix_cache(self) -> None:
        """Forgets all prefixes, at any time. Groups that run go on, and leave nothing behind."""
        if self.prefixes is not None:
            self.prefixes.reset()
        elif self._manager is not None:
            self._manager.forget_all()

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Share of prompt tokens that were not computed again; -1 without prefix caching. Stock counts blocks not yet
        computed."""
        if not self.cache_config.enable_prefix_caching or device != Device.GPU:
            return super().get_prefix_cache_hit_rate(device)
        return self.cache_stats.hit_rate

    def free_seq(self, seq: Sequence) -> None:
        """Called at finish, abort and preemption alike."""
        if self.slots is not None:
            self.slots.free(seq.seq_id)
        if self.prefixes is not None:
            self.prefixes.free(seq)
        if self.pictures is not None:
            self.pictures.forget(seq.seq_id)
        super().free_seq(seq)

    def _get_num_new_tokens(self, seq_group: SequenceGroup, status: SequenceStatus, enable_chunking: bool,
                            budget: _stock.SchedulingBudget) -> int:
        """Tokens to compute next, after what the prefix cache holds and within the budget.

        Stock rounds pieces to whole blocks where prefix caching is on: with a budget of one block, one decoding
        sequence then stops every prompt. Pieces of any length are fine here, because blocks are entered when they are
        full and computed.
        """
        if self.scheduler_config.is_multi_step:
            return super()._get_num_new_tokens(seq_group, status, enable_chunking, budget)
        seqs = seq_group.get_seqs(status=status)
        if status == SequenceStatus.WAITING:
            (seq, ) = seqs
            if seq.get_len() > self._get_prompt_limit(seq_group):
                return seq.get_len()    # Uncut, so that the caller sees that it is too long.
            # Asked anew until it is admitted: the cache moves on.
            seq.reset_state_for_recompute()
            if enable_chunking and self.slots is not None and not self.slots.num_free:
                return 0
            cached = self.prefixes.start(seq_group, seq) if self.prefixes is not None else 0
            if cached:
                seq.data.update_num_computed_tokens(cached)
        num_new_tokens = sum(seq.get_num_new_tokens() for seq in seqs)
        assert num_new_tokens > 0
        if enable_chunking and len(seqs) == 1:
            if self.prefixes is not None:
                num_new_tokens = self.prefixes.piece(seqs[0], num_new_tokens)
            return min(num_new_tokens, budget.remaining_token_budget())
        return num_new_tokens

    def _allocate_and_set_running(self, seq_group: SequenceGroup) -> None:
        (seq, ) = seq_group.get_seqs(status=SequenceStatus.WAITING)
        super()._allocate_and_set_running(seq_group)
        init = self.prefixes.admitted(seq_group, seq) if self.prefixes is not None else (ZERO, 0)
        if self.slots is not None:
            self.slots.allocate(seq.seq_id, *init)
        if seq_group.num_cached_tokens is None:
            seq_group.num_cached_tokens = 0

    def displace(self, seq_group: SequenceGroup) -> None:
        """Preempts a running group, as stock does when memory runs out; it waits, last, to be computed again."""
        if self.use_async_output_proc:
            # What the last step has made of it is taken up first; it may be finished by that.
            self.output_proc_callback(request_id=seq_group.request_id)
        self.running.remove(seq_group)
        if seq_group.is_finished():
            self._free_finished_seq_group(seq_group)
            return
        self._preempt(seq_group, [])
        self.waiting.append(seq_group)

    def _preempt(self, seq_group: SequenceGroup, *args: Any, **kwargs: Any) -> _stock.PreemptionMode:
        self._preempted = True
        self._forget_partial_logprobs(seq_group)
        return super()._preempt(seq_group, *args, **kwargs)

    @staticmethod
    def _forget_partial_logprobs(seq_group: SequenceGroup) -> None:
        """All of a prompt's logprobs will come again, if some of them are known."""
        if not any(seq.get_output_len() for seq in seq_group.get_seqs()):
            seq_group.prompt_logprobs = None

    def _schedule_prefills(self, budget: _stock.SchedulingBudget, curr_loras: set[int] | None,
                           enable_chunking: bool = False) -> _stock.SchedulerPrefillOutputs:
        """Admits nobody in a step that preempted: the newcomer would overtake, and take the room of, who has just lost
        it. Passes over those who wait for another's prefix."""
        if self._preempted and enable_chunking:
            return _stock.SchedulerPrefillOutputs.create_empty()
        if enable_chunking and self.scheduler_config.policy == "priority":
            # Stock looks at priorities only where prompts are not cut. No request that runs is pushed out for another.
            self.waiting = deque(sorted(self.waiting, key=lambda group: (group.priority, group.arrival_time)))
        if self.prefixes is None:
            return super()._schedule_prefills(budget, curr_loras, enable_chunking)
        window = list(islice(self.waiting, budget.max_num_seqs + _WINDOW))
        ready, others = self.prefixes.may_start(window, budget.max_num_seqs - budget.num_curr_seqs,
                                                budget.remaining_token_budget())
        rest, self.waiting = self.waiting, deque(ready)
        outputs = super()._schedule_prefills(budget, curr_loras, enable_chunking)
        left = {group.request_id for group in (*self.waiting, *others)}
        for _ in window:
            rest.popleft()
        rest.extendleft(group for group in reversed(window) if group.request_id in left)
        self.waiting = rest
        for group in outputs.ignored_seq_groups:
            for seq in group.get_seqs():
                self.prefixes.free(seq)
                self.block_manager.free(seq)
        return outputs


def _rows(scheduled: Iterable[Any]) -> Iterator[tuple[Sequence, int, int]]:
    """Yields (sequence, first token, number of tokens) of each row of a step that was just scheduled."""
    for one in scheduled:
        (seq, ) = one.seq_group.get_seqs(status=SequenceStatus.RUNNING)
        yield seq, seq.data.get_num_computed_tokens(), one.token_chunk_size


def _forget_known_prompt_logprobs(group: SequenceGroupMetadata) -> None:
    """Keeps a recomputation from asking for prompt logprobs that are known, which an output beside the prompt shows.

    Stock asks for them over prompt and output, finds prompt tokens for a part of the rows only, and fails.
    """
    params = group.sampling_params
    if (params is not None and params.prompt_logprobs is not None
            and any(data.get_output_len() for data in group.seq_data.values())):
        group.sampling_params = params.clone()
        group.sampling_params.prompt_logprobs = None


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
