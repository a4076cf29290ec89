"""The scheduler without an engine: slots of recurrent state, pieces of prompts, preemption."""
import pytest

from tests.core.groups import BLOCK, appended, computed, group
from vllm.config import CacheConfig, SchedulerConfig
from vllm.core.scheduler import Scheduler
from vllm.overlay.hybrid import KEEP, ZERO, SequenceOrders
from vllm.sequence import SequenceStatus


def scheduler(slots=0, blocks=64, tokens=16, seqs=4, caching=False, length=200, chunked=True):
    cache = CacheConfig(BLOCK, 1.0, 0, "auto", enable_prefix_caching=caching)
    cache.num_gpu_blocks, cache.num_cpu_blocks, cache.num_state_slots = blocks, 0, slots
    return Scheduler(
        SchedulerConfig(tokens if chunked else max(tokens, length), seqs, length, enable_chunked_prefill=chunked),
        cache, None)


def step(one, token=5):
    """Schedules, pretends that the model ran, and returns {request id: (tokens computed, state orders)}."""
    metadata, outputs, _ = one.schedule()
    ran = {}
    for meta, scheduled in zip(metadata, outputs.scheduled_seq_groups, strict=True):
        ran[meta.request_id] = (scheduled.token_chunk_size, meta.state_orders)
        computed(scheduled.seq_group, scheduled.token_chunk_size)
        if meta.do_sample:
            appended(scheduled.seq_group, token)
    one.step_succeeded()
    return ran


def finish(one, which):
    (found, ) = [each for each in one.running if each.request_id == which]
    found.seqs[0].status = SequenceStatus.FINISHED_STOPPED
    one.free_finished_seq_groups()


def test_a_slot_is_zeroed_once_and_kept():
    one = scheduler(slots=4)
    one.add_seq_group(group(range(40), request_id="a"))
    orders = [step(one)["a"] for _ in range(4)]
    slot = orders[0][1].live_slot
    assert [tokens for tokens, _ in orders] == [16, 16, 8, 1]
    assert [order for _, order in orders] == [SequenceOrders(slot, ZERO)] + [SequenceOrders(slot, KEEP)] * 3


@pytest.mark.parametrize("leave", ["abort", "finish", "preempt"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_slot_is_given_back_and_zeroed_for_the_next(leave, steps):
    one = scheduler(slots=1, seqs=1)
    first, second = group(range(40), request_id="a"), group(range(10), request_id="b")
    one.add_seq_group(first)
    for _ in range(steps):
        step(one)
    if leave == "preempt":
        one.enable_artificial_preemption, one.artificial_preempt_cnt = True, 10**9
        while one.running:
            step(one)
        one.enable_artificial_preemption = False
        assert one.slots.num_free == 1
        assert step(one)["a"] == (16, SequenceOrders(0, ZERO))
        return
    if leave == "abort":
        one.abort_seq_group("a")
    else:
        finish(one, "a")
    assert one.slots.num_free == 1
    one.add_seq_group(second)
    assert step(one)["b"] == (10, SequenceOrders(0, ZERO))


def test_never_more_sequences_than_slots():
    one = scheduler(slots=3, seqs=3, tokens=8)
    for index in range(9):
        one.add_seq_group(group(range(13 + index), request_id=str(index)))
    for number in range(60):
        ran = step(one)
        slots = [orders.live_slot for _, orders in ran.values()]
        assert len(set(slots)) == len(slots) and len(one.running) <= 3 and one.slots.num_free == 3 - len(one.running)
        if number % 5 == 4 and one.running:
            finish(one, one.running[0].request_id)


def test_models_without_state_have_no_orders():
    one = scheduler()
    one.add_seq_group(group(range(10), request_id="a"))
    assert one.slots is None and step(one)["a"] == (10, None)


def test_without_chunked_prefill():
    one = scheduler(slots=2, seqs=2, chunked=False)
    for index in range(3):
        one.add_seq_group(group(range(40 + index), request_id=str(index)))
    assert {key: tokens for key, (tokens, _) in step(one).items()} == {"0": 40, "1": 41}
    assert step(one)["0"] == (1, SequenceOrders(0, KEEP))
    finish(one, "0")
    assert step(one)["2"] == (42, SequenceOrders(0, ZERO))


def test_the_budget_is_used_to_the_last_token():
    """Stock rounds pieces down to whole blocks under prefix caching, and demands a budget of whole blocks."""
    one = scheduler(caching=True, tokens=7)
    one.add_seq_group(group(range(3), request_id="a"))
    one.add_seq_group(group(range(50, 90), request_id="b"))
    assert {key: tokens for key, (tokens, _) in step(one).items()} == {"a": 3, "b": 4}
    assert {key: tokens for key, (tokens, _) in step(one).items()} == {"a": 1, "b": 6}


def test_hits_are_tokens_already_computed():
    one = scheduler(caching=True, tokens=64)
    one.add_seq_group(group(range(40), request_id="a"))
    step(one)
    second, third = group([*range(40), 7], request_id="b"), group(range(40), request_id="c")
    one.add_seq_group(second)
    one.add_seq_group(third)
    assert {key: tokens for key, (tokens, _) in step(one).items()} == {"a": 1, "b": 1, "c": 4}
    assert (second.num_cached_tokens, third.num_cached_tokens) == (40, 36)
    assert (one.cache_stats.queries, one.cache_stats.hits) == (40 + 41 + 40, 76)
    metadata, _, _ = one.schedule()
    assert all(not meta.computed_block_nums for meta in metadata), "the runner must not hear of hits"


@pytest.mark.parametrize("tokens, expected", [(16, 11), (64, 4), (512, 2)])
def test_a_prompt_waits_for_the_one_that_computes_its_beginning(tokens, expected):
    """Without recurrent state, too. Stock computes it beside the other, as often as it comes."""
    one = scheduler(caching=True, tokens=tokens, blocks=500)
    groups = [group([*range(160), number], request_id=str(number)) for number in range(3)]
    for each in groups:
        one.add_seq_group(each)
    computed, steps = 0, 0
    while not all(each.seqs[0].get_output_len() for each in groups):
        computed += sum(count for count, _ in step(one).values())
        steps += 1
    decoded = sum(each.seqs[0].get_output_len() - 1 for each in groups)
    assert computed == 161 + 1 + 1 + decoded and [each.num_cached_tokens for each in groups] == [0, 160, 160]
    assert steps == expected


def test_short_beginnings_are_not_waited_for():
    one = scheduler(caching=True, tokens=512, blocks=500)
    for number in range(3):
        one.add_seq_group(group([*range(31), *range(100 * number + 100, 100 * number + 150)], request_id=str(number)))
    assert {key: count for key, (count, _) in step(one).items()} == {"0": 81, "1": 81, "2": 81}


def test_reset_between_steps():
    one = scheduler(caching=True, tokens=64)
    one.add_seq_group(group(range(40), request_id="a"))
    step(one)
    one.reset_prefix_cache()
    one.add_seq_group(group(range(40), request_id="b"))
    assert step(one)["b"][0] == 40
    assert one.cache_stats.hits == 0
    finish(one, "a")
    finish(one, "b")
    assert one.block_manager.get_num_free_gpu_blocks() == 64


def test_a_prompt_that_is_too_long_is_ignored_in_pieces_too():
    """Stock cuts it first and then finds the piece short enough."""
    one = scheduler(length=30)
    one.add_seq_group(group(range(31), request_id="long"))
    one.add_seq_group(group(range(5), request_id="short"))
    _, outputs, _ = one.schedule()
    assert [each.request_id for each in outputs.ignored_seq_groups] == ["long"]
    assert [each.seq_group.request_id for each in outputs.scheduled_seq_groups] == ["short"]


def test_preemption_is_always_by_recomputation():
    config = SchedulerConfig(16, 4, 200, enable_chunked_prefill=True, preemption_mode="swap")
    cache = CacheConfig(BLOCK, 1.0, 0, "auto")
    cache.num_gpu_blocks, cache.num_cpu_blocks = 4, 0
    one = Scheduler(config, cache, None)
    for name in "ab":
        one.add_seq_group(group(range(7), request_id=name))
    for _ in range(3):
        step(one)
    assert one.num_cumulative_preemption == 1 and not one.swapped and [each.request_id for each in one.waiting] == ["b"]


def test_nobody_is_admitted_in_a_step_that_preempts():
    one = scheduler(blocks=5, seqs=3)
    one.add_seq_group(group(range(7), request_id="old"))
    one.add_seq_group(group(range(50, 57), request_id="young"))
    step(one)
    step(one)
    one.add_seq_group(group([1], request_id="new"))
    for _ in range(3):
        ran = step(one)
        if one.waiting and one.waiting[0].request_id == "young":
            assert "new" not in ran
            return
    raise AssertionError("nobody was preempted")


def test_priorities_decide_who_is_admitted_in_pieces_too():
    """Stock forgets them where prompts are cut, which here is the default."""
    one = scheduler(seqs=1)
    one.scheduler_config.policy = "priority"
    for name, priority in (("running", 5), ("late", 5), ("urgent", 0), ("later", 9)):
        one.add_seq_group(group(range(3), request_id=name, priority=priority))
        if name == "running":
            assert list(step(one)) == ["running"]
    assert list(step(one)) == ["running"], "nobody who runs is pushed out"
    order = []
    while one.running:
        order.append(one.running[0].request_id)
        finish(one, order[-1])
        step(one)
    assert order == ["running", "urgent", "late", "later"]
