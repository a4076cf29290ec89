"""A scheduler driven without models: a worker that only remembers *what* each slot and block holds, and objects to
everything that is not as it should be.

The content of a place is the hash of all that came before it (`Truth`), so a block or state that belongs to another
prefix, another length, or a step that failed, is seen at once.
"""
from collections import deque
from itertools import count
from types import SimpleNamespace

from vllm.config import CacheConfig, SchedulerConfig
from vllm.core.scheduler import Scheduler
from vllm.overlay.hybrid import KEEP, ZERO
from vllm.overlay.hybrid.state_orders import StepOrders
from vllm.overlay.prefix_cache.content_hash import extend_chain
from vllm.sampling_params import SamplingParams
from vllm.sequence import Sequence, SequenceGroup, SequenceStatus

BLOCK = 16
GARBAGE = "garbage"
EMPTY = hash("empty")
_ids = count(1)


class Truth:
    """What a sequence's places hold: [i] is the content after i tokens."""

    def __init__(self):
        self._chains = {}

    def __call__(self, seq, end):
        chain = self._chains.setdefault(seq.seq_id, [EMPTY])
        for one in seq.hash_ids(len(chain) - 1, end) if len(chain) <= end else ():
            chain.append(hash((chain[-1], one)))
        return chain


class Missing(Exception):
    """What vllm.overlay.hybrid.CheckpointError is to the engine."""

    def __init__(self, tags):
        super().__init__(tags)
        self.tags = tags


class Worker:
    """Carries out the orders of steps. states: slot -> content. tags: slot -> checkpoint that it holds. blocks: KV
    block -> content after each of its places."""

    def __init__(self, live, device, host, truth):
        self.live, self.device, self.host = live, device, host
        self.states, self.tags, self.blocks = {}, {}, {}
        self.restored, self.captured, self.moved, self.computed = 0, 0, 0, 0
        self.truth = truth

    def run(self, metadata, rows, fail=""):
        """rows: (sequence, first, count). Raises Missing before anything is written, ValueError before ("early") or
        after ("late") checkpoints have moved and the model has run."""
        orders = StepOrders.collect([group.state_orders for group in metadata], [row[2] for row in rows],
                                    sum(group.is_prompt for group in metadata), metadata[0].state_moves)
        assert not any(group.state_moves for group in metadata[1:])
        self._check_slots(orders)
        wanted = [(init, tag) for init, tag in zip(orders.inits, orders.init_tags, strict=True) if init >= 0]
        wanted += [(source, tag) for source, _, tag in orders.moves]
        missing = [tag for slot, tag in wanted if self.tags.get(slot) != tag]
        if missing:
            raise Missing(missing)
        if fail == "early":
            raise ValueError("the step failed")
        before = dict(self.states)
        for slot, init in zip(orders.live_slots, orders.inits, strict=True):
            if init != KEEP:
                self.restored += init != ZERO
                self.states[slot] = EMPTY if init == ZERO else before[init]
        for source, target, tag in orders.moves:
            self.states[target], self.tags[target] = before[source], tag
            self.moved += 1
        for _, _, slot, _ in orders.captures:
            self.tags.pop(slot, None)
            self.states[slot] = GARBAGE
        writes = set()
        for row, (group, (seq, first, number)) in enumerate(zip(metadata, rows, strict=True)):
            self._compute(row, seq, first, number, group.block_tables[seq.seq_id], orders, fail, writes)
        tables = [set(group.block_tables[seq.seq_id]) for group, (seq, _, _) in zip(metadata, rows, strict=True)]
        for block in writes:
            assert sum(block in table for table in tables) == 1, f"block {block} is written, and others read it"
        if fail:
            raise ValueError("the step failed late")
        for _, _, slot, tag in orders.captures:
            self.tags[slot] = tag
            self.captured += 1

    def _check_slots(self, orders):
        device, host = self.live + self.device, self.live + self.device + self.host
        for slot in orders.live_slots:
            assert 0 <= slot < self.live
        for slot in (one for one in orders.inits if one not in (KEEP, ZERO)):
            assert self.live <= slot < host
        for _, _, slot, _ in orders.captures:
            assert self.live <= slot < device
        for source, target, _ in orders.moves:
            assert self.live <= source < device <= target < host

    def _compute(self, row, seq, first, number, table, orders, fail, writes):
        end, slot = first + number, orders.live_slots[row]
        chain = self.truth(seq, end)
        assert self.states.get(slot) == chain[first], f"{seq.seq_id}: the state is not that after {first} tokens"
        for index in range(first // BLOCK + 1):
            last = min(first, (index + 1) * BLOCK)
            if last > index * BLOCK:
                held = self.blocks[table[index]][(last - 1) % BLOCK]
                assert held == chain[last], f"{seq.seq_id}: block {index} does not hold the KV up to {last}"
        for at in range(first, end):
            writes.add(table[at // BLOCK])
            self.blocks.setdefault(table[at // BLOCK], [None] * BLOCK)[at % BLOCK] = GARBAGE if fail else chain[at + 1]
        self.states[slot] = GARBAGE if fail else chain[end]
        self.computed += number
        for _, offset, target, _ in (one for one in orders.captures if one[0] == row):
            self.states[target] = GARBAGE if fail else chain[first + offset]


class FakeEngine:
    """A hybrid model's scheduler and worker. Tokens drawn depend on nothing but what came before them."""

    def __init__(self, device=200, host=0, blocks=4000, seqs=8, tokens=2048, length=10_000):
        cache = CacheConfig(BLOCK, 1.0, 0, "auto", enable_prefix_caching=True)
        cache.num_gpu_blocks, cache.num_cpu_blocks, cache.num_state_slots = blocks, 0, seqs
        cache.num_checkpoint_slots, cache.num_host_checkpoint_slots = device, host
        self.scheduler = Scheduler(SchedulerConfig(tokens, seqs, length, enable_chunked_prefill=True), cache, None)
        self.truth = Truth()
        self.worker = Worker(seqs, device, host, self.truth)
        self.num_blocks = blocks
        self.groups, self.left = {}, {}
        # Checkpoints that the worker has lost, which nobody has noticed yet.
        self.lost = set()
        # Content hash of a block -> what it stands for.
        self._contents, self._chains = {}, {}

    @property
    def store(self):
        return self.scheduler.prefixes.store

    @property
    def stats(self):
        return self.scheduler.cache_stats

    def add(self, tokens, answer=1, name=None, boundaries=(), pictures=None, salt=None, **params):
        """Returns the group of a request that draws `answer` tokens."""
        inputs = {"prompt_token_ids": list(tokens), "prompt": None, "multi_modal_data": None,
                  "boundaries": tuple(boundaries), "pictures": pictures,
                  "cache_salt": salt}
        seq = Sequence(next(_ids), inputs, BLOCK)
        group = SequenceGroup(name or f"r{seq.seq_id}", [seq], float(seq.seq_id),
                              sampling_params=SamplingParams(max_tokens=answer, **params))
        self.scheduler.add_seq_group(group)
        self.groups[group.request_id], self.left[group.request_id] = group, answer
        return group

    def abort(self, name):
        self.scheduler.abort_seq_group(name)
        self.groups.pop(name)

    def lose(self, slot):
        """The worker forgets what a slot holds."""
        self.lost.add(self.worker.tags[slot])
        self.worker.tags[slot] = -1

    def step(self, fail="", poison=None):
        """Returns how many tokens were computed, None if the step failed. fail: see Worker.run. poison: a group whose
        logits come out as NaN, if it is in the step."""
        metadata, outputs, _ = self.scheduler.schedule()
        rows = []
        for each in outputs.scheduled_seq_groups:
            (seq, ) = each.seq_group.get_seqs(status=SequenceStatus.RUNNING)
            rows.append((seq, seq.data.get_num_computed_tokens(), each.token_chunk_size))
        for group in outputs.ignored_seq_groups:
            self.groups.pop(group.request_id)
        if not metadata:
            return 0
        scheduled = [each.seq_group for each in outputs.scheduled_seq_groups]
        try:
            self.worker.run(metadata, rows, fail)
        except Missing as missing:
            self.scheduler.step_failed()
            self.scheduler.drop_checkpoints(missing.tags)
            self.scheduler.recompute(scheduled)
            return None
        except ValueError:
            self.scheduler.step_failed()
            for group in scheduled:
                self.abort(group.request_id)
            return None
        if poison in scheduled:
            # As `nonfinite.take_out` does, before anything of the step counts.
            self.scheduler.distrust(poison)
            self.abort(poison.request_id)
        self.scheduler.step_succeeded()
        for meta, group, (seq, first, number) in zip(metadata, scheduled, rows, strict=True):
            self._remember(seq, first, first + number)
            if group is poison:
                continue
            group.update_num_computed_tokens(number)
            if meta.do_sample:
                self._draw(group, seq)
        self.scheduler.free_finished_seq_groups()
        return sum(number for _, _, number in rows)

    def _draw(self, group, seq):
        token = self.truth(seq, seq.get_len())[-1] % 900
        seq.append_token_id(token, {token: SimpleNamespace(logprob=0.0)})
        self.left[group.request_id] -= 1
        if not self.left[group.request_id]:
            seq.status = SequenceStatus.FINISHED_STOPPED
            self.groups.pop(group.request_id, None)

    def _remember(self, seq, first, end):
        chain, truth = self._chains.setdefault(seq.seq_id, []), self.truth(seq, end)
        extend_chain(chain, seq.hash_ids, BLOCK, end // BLOCK)
        for index in range(first // BLOCK, end // BLOCK):
            self._contents[chain[index]] = truth[(index + 1) * BLOCK]

    def drain(self, limit=2000):
        """Steps until nothing is left. Returns tokens computed."""
        before = self.worker.computed
        for _ in range(limit):
            if not self.scheduler.has_unfinished_seqs():
                return self.worker.computed - before
            self.step()
        raise AssertionError(f"{limit} steps were not enough: {list(self.groups)}")

    def ask(self, tokens, answer=1, **fields):
        """Runs one request alone; returns its cached tokens."""
        group = self.add(tokens, answer, **fields)
        self.drain()
        return group.num_cached_tokens

    def check(self):
        """Everything that must hold between two steps."""
        store, worker, allocator = self.store, self.worker, self.scheduler.block_manager.gpu
        for pool, slots in ((store._device, range(worker.live, worker.live + worker.device)),
                            (store._host, range(worker.live + worker.device,
                                                worker.live + worker.device + worker.host))):
            used = [one.slot for one in store._by_tag.values() if one.on_host == (pool is store._host)]
            assert sorted(used + pool.free) == list(slots), "a slot is lost, or has two owners"
        nodes = deque([store.tree.root])
        seen, owned = set(), set()
        while nodes:
            node = nodes.popleft()
            assert node.end == (node.parent.end if node.parent else 0) + len(node.edge)
            assert not owned & set(node.edge)
            owned.update(node.edge)
            if node.parent is not None:
                assert node.checkpoint is not None or len(node.children) > 1, "a node that keeps and parts nothing"
                assert node.parent.children[node.edge[0]] is node
            if node.checkpoint is not None:
                one = node.checkpoint
                seen.add(one.tag)
                assert one.node is node and one.position == node.end * BLOCK and store._by_tag[one.tag] is one
                assert one.entry is not None and store._priority(one) >= one.entry[0]
                assert worker.tags.get(one.slot) == one.tag or one.tag in self.lost
                assert worker.states[one.slot] == self._contents[node.edge[-1]], "another state than its key says"
            nodes.extend(node.children.values())
        assert seen == set(store._by_tag) and owned == set(store.tree._owners)
        assert all(content in allocator._cached_blocks for content in owned), "a checkpoint without its KV"
        for content, block in allocator._cached_blocks.items():
            assert worker.blocks[block][-1] == self._contents[content], f"block {block} holds something else"
            in_use = allocator._refcounter.get(block) > 0
            assert in_use != (block in allocator.evictor)
            if not in_use:
                assert allocator.evictor._entries[block][0] == (content in store)
        if not self.scheduler.running:
            prefixes = self.scheduler.prefixes
            assert not prefixes._running and not prefixes._prefills
            assert self.scheduler.slots.num_free == worker.live
            assert self.scheduler.block_manager.get_num_free_gpu_blocks() == self.num_blocks
            if not self.scheduler.waiting:
                left = (prefixes._starts, prefixes._partings, prefixes._noticed, self.scheduler.block_manager._chains)
                assert not any(left), left
