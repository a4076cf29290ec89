"""Slots of checkpoints: none is lost or used twice, the least worth goes first, a step that fails leaves nothing."""
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.overlay.prefix_cache.checkpoints import CheckpointStore
from vllm.overlay.prefix_cache.policy import Policy

BLOCK = 16
POLICY = Policy(demoted_above=40)


def chain_of(name, blocks, shared=0):
    """Hashes of a prompt that begins with `shared` blocks of all prompts."""
    return [hash(("all", index)) if index < shared else hash((name, shared, index)) for index in range(blocks)]


def taken(store, chain, position, key=True, saved=None, **fields):
    found = store.capture(chain, position, key, position if saved is None else saved, **fields)
    store.commit(lambda content: True)
    return found


def test_what_a_step_captures_exists_when_it_has_ended():
    store = CheckpointStore(POLICY, range(4, 6))
    chain = chain_of("a", 10)
    first = store.capture(chain, 64, True, 64)
    assert first.slot in (4, 5) and store.find(chain, 10) is None
    assert store.capture(chain, 64, True, 64) is None, "it is under way"
    store.commit(lambda content: True)
    assert store.find(chain, 10) is first and store.find(chain, 3) is None
    assert store.capture(chain, 64, True, 64) is None, "it is there"
    assert [content in store for content in chain] == [True] * 4 + [False] * 6
    second = store.capture(chain, 160, True, 96)
    store.rollback()
    assert store.find(chain, 10) is first and second.slot is None and store.stats.device_slots == 1


def test_a_checkpoint_without_its_kv_is_not_kept():
    store = CheckpointStore(POLICY, range(4))
    chain = chain_of("a", 10)
    store.capture(chain, 64, True, 64)
    store.commit(lambda content: content != chain[2])
    assert store.find(chain, 10) is None and store.stats.device_slots == 0
    taken(store, chain, 64)
    store.capture(chain, 160, True, 96)
    store.commit(lambda content: content != chain[2])
    assert store.find(chain, 10).position == 160, "those of the one before are there: it would be gone otherwise"


@pytest.mark.parametrize("slots", [64, 333])
def test_a_full_pool_takes_the_grid_of_a_new_prompt(slots):
    """The next prompt with the same beginning loses no more than a step of the grid, whatever came before."""
    store, policy = CheckpointStore(Policy(), range(slots)), Policy()
    for number in range(3 * slots):
        chain = chain_of(number, 1000 // BLOCK)
        for point in policy.points(1000, 0, slots):
            store.capture(chain, point.position, point.key, point.saved)
        store.commit(lambda content: True)
        store.tick()
        for position in (300, 640, 950):
            found = store.find(chain, position // BLOCK)
            assert found is not None and position - found.position <= 64, (number, position, found)
    assert store.stats.evicted > slots


def test_the_least_worth_gives_its_slot():
    store = CheckpointStore(POLICY, range(2))
    small, large = chain_of("small", 10), chain_of("large", 10)
    taken(store, small, 64)
    taken(store, large, 160)
    third = chain_of("third", 10)
    assert store.capture(third, 160, False, 64) is None, "a grid point is worth less than both"
    assert taken(store, third, 128) and store.find(small, 10) is None and store.find(large, 10)
    assert store.stats.evicted == 1


def test_the_latest_prompt_has_its_grid():
    """Whatever earlier prompts left: nobody knows yet where the next one leaves it."""
    store, length = CheckpointStore(POLICY, range(100)), 64 * 40 + 1
    for name in range(30):
        store.tick()
        chain = chain_of(name, length // BLOCK)
        wanted = POLICY.points(length, 0, 100)
        found = [store.capture(chain, *point) for point in wanted]
        store.commit(lambda content: True)
        assert len(wanted) == 40 and all(found), f"prompt {name} misses {found.count(None)} of {len(wanted)}"
    keys = sum(store.find(chain_of(name, length // BLOCK), length // BLOCK) is not None for name in range(30))
    assert keys == 30, "at no key's cost"


def test_who_takes_its_predecessor_s_slot_saves_what_that_saved():
    store = CheckpointStore(POLICY, range(1))
    chain = chain_of("a", 100)
    taken(store, chain, 1440)
    assert taken(store, chain, 1600, saved=160) and store.find(chain, 100).position == 1600
    other = chain_of("b", 100)
    assert store.capture(other, 1600, True, 160) is None


def test_hits_and_time():
    store = CheckpointStore(POLICY, range(2))
    chains = [chain_of(name, 10) for name in "abc"]
    hot = taken(store, chains[0], 96)
    taken(store, chains[1], 160)
    store.hit(hot)
    store.hit(hot)
    assert taken(store, chains[2], 160) and store.find(chains[0], 10) is hot and store.find(chains[1], 10) is None
    for _ in range(50):
        store.tick()
    assert taken(store, chains[1], 64) and store.find(chains[0], 10) is hot, "the younger one was never hit"
    assert taken(store, chain_of("d", 10), 80) and store.find(chains[0], 10) is None, "all is over some day"


def test_demotion():
    store = CheckpointStore(POLICY, range(2, 3), range(3, 4))
    chains = [chain_of(name, 40) for name in "abcd"]
    first = taken(store, chains[0], 640)
    store.tick()
    second = store.capture(chains[1], 640, True, 640)
    assert store.moves == [(2, 3, first.tag)] and (second.slot, first.slot) == (2, 3)
    store.commit(lambda content: True)
    assert not store.moves and store.find(chains[0], 40) is first
    for _ in range(3):
        store.tick()
    store.capture(chains[2], 640, True, 640)
    assert store.moves == [(2, 3, second.tag)] and first.slot is None
    store.rollback()
    assert store.stats.device_slots == store.stats.host_slots == 0, "nobody knows whether it has moved"


def test_what_is_on_its_way_to_the_host_keeps_its_slot_there():
    """A sequence whose rolling checkpoint has just been moved for another's sake: the place on the host is taken until
    the step has ended."""
    store = CheckpointStore(POLICY, range(2), range(2, 4))
    a, b, c = (chain_of(name, 60) for name in "abc")
    rolling = taken(store, a, 320)
    taken(store, b, 960)
    for _ in range(5):
        store.tick()
    assert store.capture(c, 480, True, 480) and [tag for _, _, tag in store.moves] == [rolling.tag]
    again = store.capture(a, 336, True, 16, instead=rolling)
    targets = [target for _, target, _ in store.moves]
    assert len(set(targets)) == len(targets) and rolling.slot is not None
    assert again is None or again.slot not in targets
    store.commit(lambda content: True)


def test_a_rolling_checkpoint_keeps_one_slot():
    store = CheckpointStore(POLICY, range(3))
    chain, rolling = chain_of("a", 60), None
    slots = set()
    for position in range(64, 960, 16):
        rolling = taken(store, chain, position, saved=position, instead=rolling)
        slots.add(rolling.slot)
        assert store.stats.device_slots == 1
    assert len(slots) == 1
    store.hit(rolling)
    taken(store, chain, 960, instead=rolling)
    assert store.stats.device_slots == 2, "somebody else has begun there"


@pytest.mark.parametrize("how", ["kv", "from", "tags", "clear"])
def test_what_is_forgotten(how):
    told = []
    store = CheckpointStore(POLICY, range(4), needs_changed=lambda contents: told.append(set(contents)))
    chain, other = chain_of("a", 20, shared=4), chain_of("b", 20, shared=4)
    first, second, third = taken(store, chain, 64), taken(store, chain, 160), taken(store, other, 160)
    told.clear()
    if how == "kv":
        store.drop_kv(chain[5])
        gone, unneeded = {second}, set(chain[4:10])
    elif how == "from":
        store.drop_from(first)
        gone, unneeded = {first, second, third}, set(chain[:10] + other[:10])
    elif how == "tags":
        store.drop_tags([first.tag, 99])
        gone, unneeded = {first}, set()
    else:
        store.clear()
        gone, unneeded = {first, second, third}, set(chain[:10] + other[:10])
    assert {one for one in (first, second, third) if one.slot is None} == gone
    assert set().union(*told) == unneeded and store.stats.dropped == len(gone)
    assert store.stats.device_slots == 3 - len(gone)


# name of the prompt, shared blocks, position in blocks
PROMPTS = st.tuples(st.integers(0, 3), st.sampled_from([0, 4, 7]), st.integers(4, 24))
OPERATIONS = st.lists(st.one_of(
    st.tuples(st.just("step"), st.lists(st.tuples(PROMPTS, st.booleans(), st.booleans()), max_size=4),
              st.sampled_from(["commit", "commit", "commit", "rollback"])),
    st.tuples(st.just("hit"), PROMPTS),
    st.tuples(st.just("kv"), PROMPTS),
    st.tuples(st.just("from"), PROMPTS),
    st.tuples(st.just("tag"), st.integers(1, 60)),
    st.tuples(st.just("tick")),
    st.tuples(st.just("clear")),
), min_size=50, max_size=50)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 6), st.integers(0, 4), OPERATIONS)
def test_against_a_simple_model(device, host, operations):
    """10,000 operations. The model knows what each slot holds, as a worker does."""
    store = CheckpointStore(POLICY, range(10, 10 + device), range(10 + device, 10 + device + host))
    held, known, rolling = {}, {}, None
    for what, *details in operations:
        if what == "step":
            captures, end = details
            written = {}
            for (name, shared, blocks), key, rolls in captures:
                chain = chain_of(name, blocks, shared)
                found = store.capture(chain, blocks * BLOCK, key, blocks * BLOCK, rolling if rolls else None)
                if found is not None:
                    assert found.slot in range(10, 10 + device) and found.slot not in written
                    written[found.slot] = found.tag
                    known[found.tag] = chain[-1]
                    rolling = found
            moves = list(store.moves)
            targets = [target for _, target, _ in moves]
            assert len(set(targets)) == len(targets), "two moves to one slot"
            assert all(held[source] == tag and target >= 10 + device for source, target, tag in moves)
            if end == "commit":
                held.update({target: tag for _, target, tag in moves})
                held.update(written)
                store.commit(lambda content: True)
            else:
                for slot in (*written, *targets):
                    held.pop(slot, None)
                store.rollback()
        elif what in ("hit", "kv", "from"):
            name, shared, blocks = details[0]
            chain = chain_of(name, blocks, shared)
            found = store.find(chain, blocks)
            if what == "kv":
                store.drop_kv(chain[-1])
                assert chain[-1] not in store
            elif found is not None:
                (store.hit if what == "hit" else store.drop_from)(found)
        elif what == "tag":
            store.drop_tags(details)
        else:
            getattr(store, what)()
        check(store, held, known, device, host)


def check(store, held, known, device, host):
    there = list(store._by_tag.values())
    slots = sorted([one.slot for one in there] + store._device.free + store._host.free)
    assert slots == list(range(10, 10 + device + host))
    for one in there:
        assert held[one.slot] == one.tag and one.node.checkpoint is one and one.node.edge[-1] == known[one.tag]
        assert one.on_host == (one.slot >= 10 + device)
    for pool, on_host in ((store._device, False), (store._host, True)):
        worth = [store._priority(one) for one in there if one.on_host == on_host]
        lowest = pool.lowest(store._priority)
        assert (lowest is None) == (not worth) and (not worth or store._priority(lowest) == min(worth))
    assert (store.stats.device_slots, store.stats.host_slots) == (sum(not one.on_host for one in there),
                                                                sum(one.on_host for one in there))
