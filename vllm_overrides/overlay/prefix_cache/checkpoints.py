"""Which checkpoints of recurrent state exist, in which slots, and which of them gives its slot away.

Numbers only: the scheduler's part of the matter, and the simulation's (`worklogs/cache_sim.py`). Workers carry out what
is decided here, in the next step. A step is one transaction: what it captures and moves exists for others after
`commit`, and is forgotten by `rollback`.
"""
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from vllm.overlay.prefix_cache.policy import Policy
from vllm.overlay.prefix_cache.prefix_tree import Node, PrefixTree, walk
from vllm.overlay.prefix_cache.stats import PrefixCacheStats


@dataclass(eq=False)
class Checkpoint:
    """The state after `position` tokens of a prefix.

    tag: its number, never given twice. slot: where it is; None once it is gone. key: see `policy`. hits: restores.
    last_use: admitted requests before it was taken or hit.
    """
    tag: int
    position: int
    key: bool
    slot: int | None
    on_host: bool = False
    hits: int = 0
    last_use: int = 0
    node: Node | None = None
    # In the heap; None while it must keep its slot.
    entry: "_Entry | None" = field(default=None, repr=False)


_Entry = tuple[float, int, Checkpoint]


class _Slots:
    """Free slots of one kind, and whose slot goes first. An entry's priority may be too low, because hits and the end
    of neighbours raise it, which is noticed when it surfaces; whoever lowers one calls `rank` at once."""

    def __init__(self, slots: range) -> None:
        self.size = len(slots)
        self.free = list(reversed(slots))
        # Of grid points and of keys.
        self._heaps: tuple[list[_Entry], list[_Entry]] = ([], [])
        self._arrivals = count()

    @property
    def used(self) -> int:
        return self.size - len(self.free)

    def rank(self, checkpoint: Checkpoint, priority: float) -> None:
        checkpoint.entry = (priority, next(self._arrivals), checkpoint)
        heap = self._heaps[checkpoint.key]
        heapq.heappush(heap, checkpoint.entry)
        if len(heap) > 2 * self.size + 64:
            heap[:] = [entry for entry in heap if entry[2].entry is entry]
            heapq.heapify(heap)

    def lowest(self, priority: Callable[[Checkpoint], float]) -> Checkpoint | None:
        """Returns the checkpoint whose slot goes first; None if all must stay."""
        heads = [entry for heap in self._heaps if (entry := self._lowest_of(heap, priority)) is not None]
        return min(heads)[2] if heads else None

    def lowest_grid(self, priority: Callable[[Checkpoint], float]) -> Checkpoint | None:
        """Returns the grid point whose slot goes first."""
        entry = self._lowest_of(self._heaps[False], priority)
        return entry[2] if entry is not None else None

    def _lowest_of(self, heap: list[_Entry], priority: Callable[[Checkpoint], float]) -> _Entry | None:
        while heap:
            entry = heap[0]
            checkpoint = entry[2]
            now = priority(checkpoint) if checkpoint.entry is entry else None
            if now is not None and now <= entry[0]:
                return entry
            heapq.heappop(heap)
            if now is not None:
                self.rank(checkpoint, now)
        return None


class CheckpointStore:
    """All checkpoints of one scheduler. `content in store`: whether one needs the KV block of that hash.

    moves: (source slot, target slot, tag) of the running step: from the device to the host.
    """

    def __init__(self,
                 policy: Policy,
                 device: range,
                 host: range = range(0),
                 stats: PrefixCacheStats | None = None,
                 needs_changed: Callable[[Iterable[int]], None] = lambda contents: None) -> None:
        """device, host: the slots. needs_changed: called with hashes of KV blocks that checkpoints need from now on, or
        no longer."""
        self.policy = policy
        self.stats = stats if stats is not None else PrefixCacheStats()
        self.tree = PrefixTree()
        self.moves: list[tuple[int, int, int]] = []
        self._device, self._host = _Slots(device), _Slots(host)
        self._needs_changed = needs_changed
        self._tags = count(1)
        self._clock = 0
        self._by_tag: dict[int, Checkpoint] = {}
        # Of the running step: hash at the end -> (checkpoint, chain).
        self._pending: dict[int, tuple[Checkpoint, Sequence[int]]] = {}
        self._moved: list[Checkpoint] = []

    def __contains__(self, content: object) -> bool:
        return content in self.tree

    @property
    def num_slots(self) -> int:
        """On the device."""
        return self._device.size

    def tick(self) -> None:
        """A request was admitted: what was used before it is older by one."""
        self._clock += 1

    def find(self, chain: Sequence[int], num_blocks: int) -> Checkpoint | None:
        """Returns the last checkpoint within the first `num_blocks` blocks of a chain."""
        return self.tree.nearest(chain, num_blocks)

    def hit(self, checkpoint: Checkpoint) -> None:
        """Notes that a sequence starts from it."""
        checkpoint.hits += 1
        checkpoint.last_use = self._clock
        self.stats.hit += 1

    def capture(self,
                chain: Sequence[int],
                position: int,
                key: bool,
                saved: int,
                instead: Checkpoint | None = None) -> Checkpoint | None:
        """Finds a slot for a checkpoint that the step being scheduled computes. Returns it, None if there is one
        already or none is worth less.

        chain: hashes of at least its first `position` tokens; kept until the step has ended. saved: see
        `policy.Point`. instead: an earlier one of the same sequence, which gives its slot if nobody else has used it.
        """
        content = chain[position // self.policy.block_size - 1]
        there = self.tree.at(chain, position // self.policy.block_size)
        if there is not None or content in self._pending:
            if there is not None:
                there.last_use = self._clock
            return None
        slot = self._slot_of(instead)
        if slot is None:
            slot = self._slot_for(chain, position, key, saved)
        if slot is None:
            return None
        taken = Checkpoint(next(self._tags), position, key, slot, last_use=self._clock)
        self._pending[content] = (taken, chain)
        self._by_tag[taken.tag] = taken
        return taken

    def commit(self, has_kv: Callable[[int], bool]) -> None:
        """The step has ended: its checkpoints exist. has_kv: whether a block of that hash can be found; a checkpoint
        without its KV is worth nothing."""
        size = self.policy.block_size
        for taken, chain in self._pending.values():
            end = taken.position // size
            if taken.slot is None:
                continue
            if not all(map(has_kv, chain[self.tree.known(chain, end):end])):
                self._release(taken)
                self.stats.dropped += 1
                continue
            needed = self.tree.insert(chain, end, taken)
            self.stats.taken += 1
            self._rank(taken)
            self._rank_below(taken)
            self._needs_changed(needed)
        for moved in self._moved:
            if moved.slot is not None:
                self._rank(moved)
        self._end_step()

    def rollback(self) -> None:
        """The step has failed: nobody knows what is in the slots that it was to write."""
        for taken, _ in self._pending.values():
            if taken.slot is not None:
                self._release(taken)
        for moved in self._moved:
            if moved.slot is not None:
                self._remove(moved)
        self._end_step()

    def drop_kv(self, content: int) -> None:
        """A KV block is gone: so are the checkpoints that need it."""
        self._forget(*self.tree.cut(content))

    def drop_from(self, checkpoint: Checkpoint) -> None:
        """Forgets a checkpoint and all that may have been computed from it."""
        if checkpoint.slot is None:
            return
        if checkpoint.node is None:
            self._release(checkpoint)
            self.stats.dropped += 1
        else:
            self._forget(*self.tree.cut_below(checkpoint.node))

    def drop_tags(self, tags: Iterable[int]) -> None:
        """Forgets checkpoints that are not where they should be."""
        for tag in tags:
            checkpoint = self._by_tag.get(tag)
            if checkpoint is not None:
                self._remove(checkpoint)
                self.stats.dropped += 1

    def clear(self) -> None:
        """Forgets everything, what the running step captures, too."""
        tree, self.tree = self.tree, PrefixTree()
        self._forget(list(self._by_tag.values()), [content for node in walk(tree.root) for content in node.edge])
        self._end_step()

    def _slot_of(self, instead: Checkpoint | None) -> int | None:
        if instead is None or instead.entry is None or instead.hits:
            return None     # It is gone, on its way to the host, or somebody's.
        self._remove(instead)
        return None if instead.on_host else self._device.free.pop()

    def _slot_for(self, chain: Sequence[int], position: int, key: bool, saved: int) -> int | None:
        if self._device.free:
            return self._device.free.pop()
        victim = self._device.lowest(self._priority)
        if victim is None or victim.entry is None or victim.node is None:
            return None
        end = victim.position // self.policy.block_size
        if victim.position == position - saved and chain[end - 1] == victim.node.edge[-1]:
            # It would take its own predecessor's place, and save what that one saved, too.
            saved += self._saved(victim)
        if self.policy.priority(saved, key, 0, self._clock, self.num_slots) < victim.entry[0]:
            # Grid points are for who comes next: the latest prompt has its own, at the cost of an earlier one's.
            victim = None if key else self._device.lowest_grid(self._priority)
            if victim is None or victim.last_use >= self._clock:
                return None
        slot = victim.slot
        if not self._demote(victim):
            self._remove(victim)
            self.stats.evicted += 1
            self._device.free.pop()
        return slot

    def _demote(self, victim: Checkpoint) -> bool:
        assert victim.entry is not None and victim.slot is not None
        if not self._host.size or not self.policy.worth_moving(self._saved(victim)):
            return False
        if not self._host.free:
            lowest = self._host.lowest(self._priority)
            if lowest is None or lowest.entry is None or lowest.entry[0] >= victim.entry[0]:
                return False
            self._remove(lowest)
            self.stats.evicted += 1
        target = self._host.free.pop()
        self.moves.append((victim.slot, target, victim.tag))
        # It stays until the step has ended: another move to the same slot would meet it there.
        victim.slot, victim.on_host, victim.entry = target, True, None
        self._moved.append(victim)
        self.stats.demoted += 1
        self._count()
        return True

    def _saved(self, checkpoint: Checkpoint) -> int:
        """Tokens from the checkpoint before it; keys look at keys only, because grid points go first."""
        node = checkpoint.node.parent if checkpoint.node is not None else None
        while node is not None:
            before = node.checkpoint
            if before is not None and (before.key or not checkpoint.key):
                return checkpoint.position - before.position
            node = node.parent
        return checkpoint.position

    def _priority(self, checkpoint: Checkpoint) -> float:
        return self.policy.priority(self._saved(checkpoint), checkpoint.key, checkpoint.hits, checkpoint.last_use,
                                    self.num_slots)

    def _rank(self, checkpoint: Checkpoint) -> None:
        (self._host if checkpoint.on_host else self._device).rank(checkpoint, self._priority(checkpoint))

    def _rank_below(self, new: Checkpoint) -> None:
        """Ranks those anew that save less because there is a checkpoint before them now."""
        assert new.node is not None
        left = list(new.node.children.values())
        while left:
            node = left.pop()
            found = node.checkpoint
            if found is not None and found.entry is not None:
                self._rank(found)
            # Behind a grid point there may be a key whose next key is the new one.
            if found is None or (new.key and not found.key):
                left.extend(node.children.values())

    def _remove(self, checkpoint: Checkpoint) -> None:
        """Takes it out, whether it is in the tree yet or not."""
        if checkpoint.node is not None:
            unneeded = self.tree.remove(checkpoint.node)
            checkpoint.node = None
            self._release(checkpoint)
            self._needs_changed(unneeded)
        else:
            self._release(checkpoint)

    def _forget(self, checkpoints: Iterable[Checkpoint], unneeded: Iterable[int]) -> None:
        for checkpoint in checkpoints:
            checkpoint.node = None
            self._release(checkpoint)
            self.stats.dropped += 1
        self._needs_changed(unneeded)

    def _release(self, checkpoint: Checkpoint) -> None:
        if checkpoint.slot is None:
            return
        (self._host if checkpoint.on_host else self._device).free.append(checkpoint.slot)
        checkpoint.slot = checkpoint.entry = None
        del self._by_tag[checkpoint.tag]
        self._count()

    def _end_step(self) -> None:
        self._pending.clear()
        self._moved.clear()
        self.moves.clear()
        self._count()

    def _count(self) -> None:
        self.stats.device_slots, self.stats.host_slots = self._device.used, self._host.used
