"""The scheduler's side of the prefix cache: what a prompt need not compute, where it leaves checkpoints, who waits for
whom.

For models with recurrent state a hit is the last place up to which the KV blocks are known *and* of which there is a
checkpoint; for others the KV blocks are enough. Two books are joined here, `block_manager` and `checkpoints`: this
module knows sequences and steps, and they need not know each other.
"""
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.logger import init_logger
from vllm.overlay.hybrid.state_orders import ZERO
from vllm.overlay.prefix_cache.block_manager import ComputedBlockManager, is_hashed
from vllm.overlay.prefix_cache.checkpoints import Checkpoint, CheckpointStore
from vllm.overlay.prefix_cache.policy import Point, Policy
from vllm.overlay.prefix_cache.sharing import shared_blocks
from vllm.overlay.prefix_cache.stats import PrefixCacheStats
from vllm.sequence import Sequence, SequenceGroup
from vllm.utils import cdiv

logger = init_logger(__name__)

# (offset in the piece, slot, tag), as in `SequenceOrders.captures`.
Capture = tuple[int, int, int]


@dataclass
class _Start:
    """Where a waiting sequence would start. known, hit: leading tokens whose KV is in the cache, and which need no
    computing. checkpoint: behind the latter. cut: see `_Running`. reason: why it is not more, as in PrefixCacheStats;
    "" where it could not be."""
    known: int = 0
    hit: int = 0
    checkpoint: Checkpoint | None = None
    cut: int = 0
    reason: str = ""


@dataclass
class _Running:
    """A sequence that was admitted.

    cut: where its prompt is cut in two pieces, 0 = nowhere. points: where its prompt is still to take checkpoints,
    ascending. last: the last place of the prompt that a hit may reach. base: of the last key taken. used: checkpoints
    that it began from or left in its prompt. rolling: the one that moves along while it generates.
    """
    cut: int
    last: int
    base: int
    points: list[Point] = field(default_factory=list)
    used: list[Checkpoint] = field(default_factory=list)
    rolling: Checkpoint | None = None
    # It leaves no checkpoints, or no more: nobody could find, or should trust, them.
    silent: bool = False


class _Admission(NamedTuple):
    """A group's first, in the running step."""
    group: SequenceGroup
    num_tokens: int
    cached: int
    reason: str


class _Wanted(NamedTuple):
    """A checkpoint that the step being scheduled may take. first: of the piece's tokens."""
    seq: Sequence
    running: _Running
    first: int
    point: Point
    rolls: bool


class PrefixCache:
    """Of one scheduler with prefix caching and chunked prefill."""

    def __init__(self,
                 manager: ComputedBlockManager,
                 stats: PrefixCacheStats,
                 live_slots: int = 0,
                 device_slots: int = 0,
                 host_slots: int = 0) -> None:
        """live_slots: of the model's recurrent state; 0 = it has none. device_slots, host_slots: of checkpoints,
        numbered behind them."""
        self.stats = stats
        self.hybrid = live_slots > 0
        self.policy = Policy(manager.block_size)
        device = range(live_slots, live_slots + device_slots)
        host = range(device.stop, device.stop + host_slots)
        self.store = CheckpointStore(self.policy, device, host, stats, manager.gpu.needs_changed)
        if self.hybrid:
            manager.gpu.evictor.needed = self.store
            manager.gpu.on_removed = self.store.drop_kv
        self._manager = manager
        self._size = manager.block_size
        self._starts: dict[int, _Start] = {}
        self._running: dict[int, _Running] = {}
        # Of prompts that are being computed, and where others leave those that wait.
        self._prefills: dict[int, Sequence] = {}
        self._partings: dict[int, set[int]] = {}
        # Waiting sequences that have said where they part, when so many had been admitted.
        self._noticed: dict[int, int] = {}
        self._num_admitted = 0
        self._admissions: list[_Admission] = []

    def start(self, group: SequenceGroup, seq: Sequence) -> int:
        """Returns how many tokens of a waiting sequence need no computing, as of now."""
        start = self._starts[seq.seq_id] = self._look_up(group, seq)
        return start.hit

    def _look_up(self, group: SequenceGroup, seq: Sequence) -> _Start:
        params, last = group.sampling_params, self.policy.last(seq.get_len())
        if params is None or params.prompt_logprobs is not None:
            return _Start(reason="prompt_logprobs")
        if not is_hashed(group):
            return _Start(reason="adapter")
        if last < (self.policy.first if self.hybrid else self._size):
            return _Start(reason="short")
        blocks = self._manager.num_known_blocks(seq)
        known = blocks * self._size
        if not self.hybrid:
            return _Start(known, known, reason="cold" if known < last else "")
        found = self.store.find(self._manager.chain(seq, blocks), blocks)
        hit = 0 if found is None else found.position
        # Where the next request of the same prompt will begin: so that both compute the rest in the same way, to the
        # last bit.
        cut = 0 if hit else last
        reason = "no_checkpoint" if hit < known else "cold" if known < last else ""
        return _Start(known, hit, found, cut, reason)

    def admitted(self, group: SequenceGroup, seq: Sequence) -> tuple[int, int]:
        """Notes that a waiting sequence runs from now on, as `start` has said last. Returns what its state starts from:
        (slot, tag) of a checkpoint, or (ZERO, 0)."""
        start = self._starts.pop(seq.seq_id)
        running = _Running(start.cut, self.policy.last(seq.get_len()), start.hit, silent=not is_hashed(group))
        self._running[seq.seq_id] = running
        if not running.silent:
            self._prefills[seq.seq_id] = seq
        if self.hybrid and not running.silent:
            partings = self._partings.pop(seq.seq_id, set()) | {start.known}
            running.points = self.policy.points(seq.get_len(), start.hit, self.store.num_slots, seq.boundaries,
                                                partings)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = start.hit
            self._admissions.append(_Admission(group, seq.get_len(), start.hit, start.reason))
        logger.debug("%s: %d of %d tokens from the prefix cache%s", group.request_id, start.hit, seq.get_len(),
                     _why_not_more(start))
        self._num_admitted += 1
        self.store.tick()
        if start.checkpoint is None:
            return ZERO, 0
        self.store.hit(start.checkpoint)
        running.used.append(start.checkpoint)
        assert start.checkpoint.slot is not None
        return start.checkpoint.slot, start.checkpoint.tag

    def piece(self, seq: Sequence, num_tokens: int) -> int:
        """Returns how many of the next `num_tokens` tokens of a sequence are to be computed in one piece."""
        there = self._running.get(seq.seq_id) or self._starts.get(seq.seq_id)
        left = there.cut - seq.data.get_num_computed_tokens() if there is not None else 0
        return min(num_tokens, left) if left > 0 else num_tokens

    def scheduled(self, rows: Iterable[tuple[Sequence, int, int]]) -> dict[int, tuple[Capture, ...]]:
        """Returns the captures of the step being scheduled, by sequence.

        rows: (sequence, first token, number of tokens) of each.
        """
        wanted: list[_Wanted] = []
        for seq, first, count in rows:
            end = first + count
            ends = end == seq.get_len()
            if ends:
                self._prefills.pop(seq.seq_id, None)
            running = self._running.get(seq.seq_id)
            if not self.hybrid or running is None or running.silent:
                continue
            passed = bisect_right(running.points, end, key=lambda point: point.position)
            wanted += [_Wanted(seq, running, first, point, False) for point in running.points[:passed]]
            del running.points[:passed]
            if ends and end % self._size == 0 and end > max(running.last, self.policy.first - 1):
                wanted.append(_Wanted(seq, running, first, Point(end, True, end - running.base), True))
        # Keys first: where slots are few they are worth more.
        wanted.sort(key=lambda each: not each.point.key)
        captures: dict[int, list[Capture]] = {}
        for each in wanted:
            taken = self._take(each)
            if taken is not None and taken.slot is not None:
                captures.setdefault(each.seq.seq_id, []).append((taken.position - each.first, taken.slot, taken.tag))
        return {seq_id: tuple(sorted(found)) for seq_id, found in captures.items()}

    def _take(self, wanted: _Wanted) -> Checkpoint | None:
        seq, running, _, (position, key, saved), rolls = wanted
        chain = self._manager.chain(seq, position // self._size)
        taken = self.store.capture(chain, position, key, saved, running.rolling if rolls else None)
        if taken is None:
            return None
        if rolls:
            running.rolling = taken
        else:
            running.used.append(taken)
            running.base = max(running.base, position if key else 0)
        return taken

    @property
    def moves(self) -> tuple[tuple[int, int, int], ...]:
        """(source slot, target slot, tag) of the step being scheduled, after `scheduled`."""
        return tuple(self.store.moves)

    def may_start(self, window: Iterable[SequenceGroup], seqs: int,
                  tokens: int) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
        """Parts waiting groups into those that may start now and the others, both in order.

        Who shares a beginning with a prompt that is being computed, or may start before it, waits until that one has
        passed it, and leaves a checkpoint there. Once the first groups take all that the step can give, the rest only
        say where they part from those, and that once for each that was admitted.

        seqs, tokens: what the step can take in.
        """
        ahead = list(self._prefills.values())
        blocks = self._manager.get_num_free_gpu_blocks()
        ready: list[SequenceGroup] = []
        others: list[SequenceGroup] = []
        for group in window:
            (seq, ) = group.get_seqs()
            if min(seqs, tokens, blocks) < 1:
                others.append(group)
                if self._noticed.get(seq.seq_id) != self._num_admitted and is_hashed(group):
                    self._noticed[seq.seq_id] = self._num_admitted
                    self._wait_for(seq, 0, ahead)
                continue
            if not is_hashed(group):
                # It may be passed over for want of room for its adapter, and so takes nothing away yet.
                ready.append(group)
                continue
            start = self._look_up(group, seq)
            if start.reason not in ("prompt_logprobs", "short") and self._wait_for(seq, start.hit, ahead):
                others.append(group)
            else:
                ready.append(group)
                seqs -= 1
                tokens -= (start.cut or seq.get_len()) - start.hit
                blocks -= cdiv(seq.get_len(), self._size) - start.hit // self._size
            ahead.append(seq)
        return ready, others

    def _wait_for(self, seq: Sequence, hit: int, ahead: Iterable[Sequence]) -> bool:
        """Returns whether one of those ahead is to compute much that `seq` could use, and makes it leave a
        checkpoint."""
        for other in ahead:
            blocks = shared_blocks(self._manager.chain, self._size, seq, hit // self._size, other)
            if blocks:
                if self.hybrid:
                    self._part(other, blocks * self._size)
                return True
        return False

    def _part(self, seq: Sequence, position: int) -> None:
        """Makes a prompt leave a checkpoint at a place that it has not reached yet."""
        running = self._running.get(seq.seq_id)
        if running is None:
            self._partings.setdefault(seq.seq_id, set()).add(position)
            return
        at = bisect_left(running.points, position, key=lambda point: point.position)
        there = running.points[at:at + 1]
        if not running.silent and not any(point.position == position and point.key for point in there):
            before = max((point.position for point in running.points[:at] if point.key), default=running.base)
            end = at + 1 if there and there[0].position == position else at
            running.points[at:end] = [Point(position, True, position - before)]

    def step_succeeded(self) -> None:
        """What the last scheduled step has computed may be found from now on. Harmless a second time."""
        self._manager.step_succeeded()
        self.store.commit(self._manager.gpu.has)
        for admission in self._admissions:
            self.stats.admitted(admission.num_tokens, admission.cached, admission.reason)
        self._admissions.clear()

    def step_failed(self) -> None:
        """What the last scheduled step should have computed, or restored, is not there."""
        self._manager.step_failed()
        self.store.rollback()
        for admission in self._admissions:
            admission.group.num_cached_tokens = None
        self._admissions.clear()

    def distrust(self, seq: Sequence) -> None:
        """Keeps all that a running sequence has computed or reused from being reused again, with all that may have been
        computed from it."""
        running = self._running.get(seq.seq_id)
        if running is not None:
            for checkpoint in (*running.used, *filter(None, (running.rolling, ))):
                self.store.drop_from(checkpoint)
            self._silence(running)
        self._manager.distrust(seq)

    def free(self, seq: Sequence) -> None:
        """The sequence has finished, was aborted, or is preempted. What it left stays."""
        for each in (self._starts, self._running, self._prefills, self._partings, self._noticed):
            each.pop(seq.seq_id, None)

    def reset(self) -> None:
        """Forgets all prefixes. Sequences that run go on, and leave nothing behind."""
        self.store.clear()
        self._manager.forget_all()
        for running in self._running.values():
            self._silence(running)
        self._prefills.clear()
        self._partings.clear()

    @staticmethod
    def _silence(running: _Running) -> None:
        running.silent = True
        running.points.clear()


def _why_not_more(start: _Start) -> str:
    return {
        "": "",
        "cold": f": no KV is known beyond {start.known}",
        "no_checkpoint": f": KV is known up to {start.known}, but there is no checkpoint beyond {start.hit}",
        "short": ": too short",
        "prompt_logprobs": ": prompt_logprobs need the whole prompt",
        "adapter": ": what adapters and stock's multimodal models compute is not shared"
    }[start.reason]
