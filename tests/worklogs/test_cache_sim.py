"""The model of the prefix cache: what it must find, what it must not lose, and the program's table."""
import json

import pytest

from vllm.overlay.prefix_cache.checkpoints import CheckpointStore
from vllm.overlay.prefix_cache.policy import Policy
from worklogs import cache_sim
from worklogs.replay_trace import Request

CLASSES = (Policy, CheckpointStore)
# Short prompts only, so that a replay takes a second: the first turns and their successors.
SHORT = 9_000


@pytest.fixture(scope="module")
def trace():
    """Short prompts of the trace, and what an unlimited cache would find of each."""
    chosen = [request for request in cache_sim.replay_trace.build(0) if request.length < SHORT][:150]
    requests = [cache_sim.dataclasses.replace(request, index=index) for index, request in enumerate(chosen)]
    return requests, cache_sim.replay_trace.reusable(requests)


def outcome_of(trace, rule, *options, device=64, host=0, policy=()):
    arguments = cache_sim.parse(["--kv-tokens", "60000", "--slot-bytes", "163840", *options])
    setting = cache_sim.Setting(rule, device, host, policy)
    found = cache_sim.run(setting, *trace, arguments, CLASSES)
    print(cache_sim.line(setting, found, arguments.slot_bytes))
    return found


def test_bounds_enclose_the_rules(trace):
    requests, reusable = trace
    unlimited = outcome_of(trace, "unlimited", "--concurrency", "1")
    assert unlimited.cached == sum(reusable) and unlimited.again == 0
    any_checkpoint = outcome_of(trace, "any")
    assert any_checkpoint.known == 0 and any_checkpoint.cached <= unlimited.cached
    for rule in ("server", "no-grid", "lru", "fifo", "ends", "align", "llama"):
        found = outcome_of(trace, rule)
        assert found.prompt == sum(request.length for request in requests) == found.cached + found.computed
        assert found.checkpoints_taken > 0 and found.cached <= any_checkpoint.cached
    # Their places do not include the end of a shared system turn, which is most of what these prompts share.
    assert outcome_of(trace, "ends").cached < outcome_of(trace, "server").cached / 2


def test_requests_wait_for_a_prefix_that_is_being_computed(trace):
    waiting = outcome_of(trace, "server", "--concurrency", "8", "--prefill-rate", "200")
    hasty = outcome_of(trace, "server", "--concurrency", "8", "--prefill-rate", "200", "--no-wait")
    assert waiting.waited > 3 and hasty.waited == 0
    assert waiting.cached > hasty.cached


def test_a_host_pool_keeps_what_the_device_gives_up(trace):
    without = outcome_of(trace, "server", device=4)
    within = outcome_of(trace, "server", device=4, host=64, policy=(("demoted_above", 64), ))
    assert within.checkpoints_demoted > 0 and within.restored_from_host > 0
    assert within.cached > without.cached


def test_kv_pool_counts_every_block():
    pool = cache_sim.KvPool(8)
    gone: list[int] = []
    pool.on_evict = gone.append
    assert pool.start([], 5)
    assert pool.enter([1, 2, 3]) == [1, 2, 3]
    assert not pool.start([], 4)                      # 3 are free, and those in use stay
    pool.end([1, 2, 3], 2)
    assert pool.known([1, 2, 3, 9]) == 3
    pool.need(3, True)
    assert pool.start([1], 6) and gone == [2]         # 3 is the last of its prefix, but needed; 1 is in use
    assert pool.known([1, 2]) == 1 and pool.has(3)
    pool.need(3, False)
    assert pool.start([], 1) and gone == [2, 3]
    assert not pool.start([], 1)
    pool.end([1], 7)
    assert pool.start([], 7) and gone == [2, 3]
    assert pool.start([], 1) and gone == [2, 3, 1]
    assert pool.private == 8


def test_everything_is_given_back(trace):
    requests, reusable = trace
    for rule in ("server", "lru"):
        pool = cache_sim.KvPool(4_000)
        store = cache_sim.ServerStore(CheckpointStore, Policy(), 16, 16, pool) if rule == "server" else \
            cache_sim.SimpleStore(32, cache_sim.places("lru", 16384))
        cache_sim.replay(requests, reusable, pool, store, 4)
        assert pool.private == 0
        everything = {key for request in requests for key in request.keys.tolist()}
        assert pool.start([], 4_000), "blocks are still in use"
        assert not any(map(pool.has, everything))


def test_the_program_prints_and_writes_the_same(tmp_path, capsys):
    assert cache_sim.main(["--count", "30", "--rule", "server", "--rule", "lru", "--vary", "device=8,16", "--set",
                           "host=4", "--vary", "grid_share=0", "--no-progress", "--keep", str(tmp_path)], CLASSES) == 0
    *rows, last = capsys.readouterr().out.splitlines()[2:]
    (path, ) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert path.name in last
    assert [(one["rule"], one["device"], one["host"], one["policy"]) for one in record["outcomes"]] == [
        ("server", 60, 4, []), ("server", 8, 4, []), ("server", 16, 4, []), ("server", 60, 4, [["grid_share", 0.0]]),
        ("lru", 60, 4, [])]
    assert [float(row[47:].split()[0]) for row in rows] == [round(one["hit_rate"], 3) for one in record["outcomes"]]
    assert record["assumed"]["kv_tokens"] == 957_888 and record["prompt_tokens"] > record["reusable_tokens"] > 0


@pytest.mark.parametrize(("arguments", "words"), [
    (["--set", "no_such=1"], "no_such"),
    (["--kv-tokens", "5000"], "KV blocks"),
])
def test_bad_input_is_one_line(arguments, words, capsys):
    assert cache_sim.main(["--count", "5", "--rule", "server", "--no-progress", *arguments], CLASSES) == 1
    error = capsys.readouterr().err.strip()
    assert words in error and error.startswith("cache_sim: ") and "\n" not in error


def completions(times):
    """Plain completions, which name no boundaries: pairs with a shared prefix, in between prompts of all lengths.
    Returns them, and (index, length of the prefix) of the second of each pair."""
    number, requests, pairs = cache_sim.replay_trace.np.arange(1, 1 << 20), [], []
    used = 0

    def add(length, begin=(), shared=0):
        nonlocal used
        new = length // 16 - shared // 16
        keys = cache_sim.replay_trace.np.concatenate([begin[:shared // 16], number[used:used + new]]).astype("int64")
        used += new
        requests.append(Request(len(requests), length, 1, keys, keys[:0], (), -1, shared))
        return keys

    for _ in range(times):
        for step in range(35):
            add(round(20 * 250**(step / 34)))
        for prefix in (300, 1000, 3000, 6000):
            for suffix in (20, 500, 4000):
                keys = add(prefix + suffix)
                add(prefix + suffix, keys, prefix)
                pairs.append((len(requests) - 1, prefix))
    return requests, pairs


@pytest.mark.parametrize("slots", [333, 667])
def test_a_full_pool_loses_no_more_than_the_grid(slots):
    """The second sighting of a prefix that nobody announced, however many prompts came before (issue C's table)."""
    requests, pairs = completions(4)
    pool = cache_sim.KvPool(32_768)
    store = cache_sim.ServerStore(CheckpointStore, Policy(), slots, 0, pool, 2048)
    hits, admit = {}, store.admit

    def noting(request, hit, known):
        hits[request.index] = hit
        admit(request, hit, known)

    store.admit = noting
    cache_sim.replay(requests, [0] * len(requests), pool, store, 1)
    lost = [(index, prefix, prefix - hits[index]) for index, prefix in pairs if prefix - hits[index] > 64]
    assert store.evicted > 2 * slots and not lost, lost
