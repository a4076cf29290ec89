"""The replay simulation: costs come back from points, engine time adds up, and a run on a server whose costs are known
is predicted."""
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.core.fake_engine import FakeEngine
from tests.worklogs.formal_record import CHUNK, TRUTH, conversations, record, summed, write
from vllm.overlay.prefix_cache.checkpoints import CheckpointStore
from vllm.overlay.prefix_cache.policy import Policy
from vllm.overlay.prefix_cache.sharing import shared_blocks
from worklogs import cost_model, replay_sim
from worklogs.bench import tables
from worklogs.cost_model import Costs, Step
from worklogs.engine_cache import shared_ahead
from worklogs.engine_model import jittered
from worklogs.replay_requests import Rendered
from worklogs.replay_sim import Given, KvPool, Modelled, Request, Setting, requests_of, simulate


def points_for(costs, noise=0.0):
    """A points file's contents, measured on these costs."""
    chance = np.random.default_rng(0)

    def seen(seconds):
        return seconds * (1 + noise * chance.standard_normal())
    points = []
    for prompt, cached in [(100, 0), (1500, 0), (1500, 1400), (6000, 0), (6000, 5900), (20000, 0), (20000, 16000)]:
        features = cost_model.ttft_features(prompt, cached, CHUNK, costs.experts, costs.top_k)
        points.append({"what": "ttft", "prompt": prompt, "cached": cached,
                       "seconds": seen(sum(costs.values[name] * amount for name, amount in features.items()))})
    for batch in (1, 2, 4, 8):
        for context in (100, 4000, 20000):
            points.append({"what": "step", "batch": batch, "context": context,
                           "seconds": seen(costs.step(Step(decode=[context] * batch)))})
    return {"chunk": CHUNK, "experts": costs.experts, "top_k": costs.top_k, "points": points}


def fitted(tmp_path, contents):
    return cost_model.fit(*cost_model.read(write(tmp_path, "points.json", contents)))


@pytest.mark.parametrize("costs", [TRUTH, dataclasses.replace(
    TRUTH, values={**TRUTH.values, "experts": 0.05}, experts=64, top_k=4)], ids=["dense", "experts"])
def test_costs_come_back_from_exact_points(tmp_path, costs):
    found = fitted(tmp_path, points_for(costs))
    print(found.costs.values, found.undetermined)
    assert found.rms < 1e-6 and "request" not in found.undetermined
    for name, value in costs.values.items():
        assert found.costs.values[name] == pytest.approx(value, rel=1e-3, abs=1e-9), name


def test_noise_is_said_and_costs_are_never_negative(tmp_path):
    found = fitted(tmp_path, points_for(TRUTH, noise=0.05))
    assert 0.01 < found.rms < 0.1 and min(found.costs.values.values()) >= 0


def test_what_the_points_do_not_say_is_assumed(tmp_path):
    contents = {"chunk": 512, "points": [{"what": "step", "batch": 1, "context": 1000, "seconds": 0.05}],
                "assumed": {"decode_token": {"value": 0.01, "why": "because"}}}
    found = fitted(tmp_path, contents)
    assert found.costs.assumed["decode_token"] == "because" and "prefill_token" in found.undetermined
    assert found.costs.step(Step(decode=[1000])) == pytest.approx(0.05)


@pytest.mark.parametrize(("change", "words"), [
    ({"points": []}, 'holds no "points"'),
    ({"points": [{"what": "step", "batch": 1, "context": 1}]}, "point 1 has no 'seconds'"),
    ({"points": [{"what": "speed", "seconds": 1}]}, "neither 'ttft' nor 'step'"),
    ({"points": [{"what": "ttft", "prompt": 5, "cached": 5, "seconds": 1}]}, "5 of 5 tokens cached"),
    ({"points": [{"what": "ttft", "prompt": 5, "seconds": -1}]}, "-1.0 seconds"),
    ({"assumed": {"speed": {"value": 1}}}, "assumed speed: costs are"),
])
def test_bad_points_are_one_line(tmp_path, change, words, capsys):
    path = write(tmp_path, "points.json", {**points_for(TRUTH), **change})
    assert replay_sim.main(["fit", str(path)]) == 1
    error = capsys.readouterr().err.strip()
    assert words in error and "\n" not in error, error


def one(index, length, answer):
    nothing = np.zeros(0, np.int64)
    return Request(index, length, answer, nothing, nothing, (), -1, 0)


def test_time_of_a_run_adds_up_by_hand():
    """One request: two pieces, then 9 more tokens; taken together or one by one."""
    (sample, ), wall = simulate([one(0, 3000, 10)], Given({}), TRUTH, Setting(1, 2048))
    first = TRUTH.before(3000) + TRUTH.step(Step([(0, 2048)])) + TRUTH.step(Step([(2048, 952)]))
    rest = sum(TRUTH.step(Step(decode=[3000 + produced])) for produced in range(1, 10))
    assert sample["first_s"] == pytest.approx(first) and sample["last_s"] == pytest.approx(first + rest) == wall


def test_a_prompt_delays_answers_by_its_pieces_and_not_longer():
    requests = [one(0, 100, 200), one(1, 20_000, 5)]
    samples, _ = simulate(requests, Given({}), TRUTH, Setting(2, 1024), arrivals=[0.0, 1.0])
    alone, _ = simulate(requests[:1], Given({}), TRUTH, Setting(1, 1024))
    slower = (samples[0]["last_s"] - samples[0]["first_s"]) - (alone[0]["last_s"] - alone[0]["first_s"])
    prompt = sum(TRUTH.step(Step([(start, min(1024, 20_000 - start))])) for start in range(0, 20_000, 1024))
    print(f"{slower:.2f} s slower, the prompt takes {prompt:.2f} s")
    assert 0.5 * prompt < slower < prompt + 1


def test_policies_and_limits():
    requests = [one(0, 16_000, 50), one(1, 16_000, 5), one(2, 100, 5)]
    started = {}
    # Who is sent first is in the queue first, however long.
    costs = dataclasses.replace(TRUTH, values={**TRUTH.values, "prompt_token": 0.0})
    for policy in ("fcfs", "shortest", "separate"):
        samples, _ = simulate(requests, Given({}), costs, Setting(3, 2048, policy, max_num_seqs=1))
        started[policy] = [sample["first_s"] for sample in samples]
    assert started["shortest"][2] < started["shortest"][1] and started["fcfs"][2] > started["fcfs"][1]
    dropped, _ = simulate(requests, Given({}), TRUTH, Setting(1, 2048), limit_s=1.0)
    assert [sample["index"] for sample in dropped] == [0]
    with pytest.raises(ValueError, match="policy 'none'"):
        simulate(requests, Given({}), TRUTH, Setting(policy="none"))


def test_speculation_helps_by_what_is_accepted():
    plain, guessed, useless = (simulate([one(0, 100, 300)], Given({}), TRUTH, setting)[1] for setting in (
        Setting(1, 2048), Setting(1, 2048, speculate=2, acceptance=1.0), Setting(1, 2048, speculate=2, acceptance=0.0)))
    print(plain, guessed, useless)
    assert guessed < 0.5 * plain < plain < useless


@pytest.fixture(scope="module")
def validation(tmp_path_factory):
    """Points from a run with one request at a time and from a ladder of batches, and a run with four."""
    folder = tmp_path_factory.mktemp("validation")
    ladder = [point for point in points_for(TRUTH, 0.02)["points"] if point["what"] == "step"]
    alone = write(folder, "alone.json", record(1))
    micro = write(folder, "micro.json", {"kind": "decode-microbench", "points": ladder})
    points = folder / "points.json"
    assert replay_sim.main(["points", str(alone), str(micro), "--chunk", str(CHUNK), "-o", str(points)]) == 0
    return folder, points, write(folder, "four.json", record(4, seed=1))


def test_a_run_of_known_costs_is_predicted_within_fifteen_percent(validation, capsys):
    _, points, four = validation
    assert replay_sim.main(["check", str(four), "--points", str(points), *PLAIN]) == 0
    text = capsys.readouterr().out
    print(text)
    assert "within 15%: all\n" in text and "chunk 2,048, max_num_seqs 8" in text


def test_wrong_costs_are_noticed(validation, capsys):
    folder, _, _ = validation
    slow = dataclasses.replace(TRUTH, values={name: 1.5 * value for name, value in TRUTH.values.items()})
    points = write(folder, "slow.json", points_for(slow))
    assert replay_sim.main(["check", str(folder / "four.json"), "--points", str(points),
                            "--runs", "3"]) == replay_sim.OFF
    assert "all but wall_s" in capsys.readouterr().out


def test_points_of_a_concurrent_run_are_refused(validation, capsys):
    folder, _, four = validation
    assert replay_sim.main(["points", str(four), "--chunk", "1", "-o", str(folder / "none.json")]) == 1
    assert "4 requests at a time" in capsys.readouterr().err


def test_requests_of_a_record_share_what_was_possible():
    wanted, _ = conversations()
    found = requests_of(record(1))
    for one_wanted, request in zip(wanted, found, strict=True):
        assert (request.length, request.shared) == (one_wanted.length, one_wanted.shared)
        if request.parent >= 0:
            blocks = request.shared // 16
            assert (request.keys[:blocks] == found[request.parent].keys[:blocks]).all()


def test_first_turns_share_a_system_turn():
    """Conversations that begin alike: each first turn but the first repeats 160 tokens of it."""
    content = record(1)
    for sample in content["samples"]:
        if sample["turn"] == 0 and sample["index"]:
            sample["theoretical_reuse"] = 160
    found = requests_of(content)
    for request in found[1:8]:
        assert request.parent == 0 and (request.keys[:10] == found[0].keys[:10]).all()
        assert request.keys[10] != found[0].keys[10]
    assert found[0].shared == 0


def test_what_comes_later_says_nothing_of_a_request():
    """Where the first prompt's messages end does not follow from what others repeat of it, nor from how it went."""
    content = record(1)
    alone = {**content, "samples": content["samples"][:1]}
    for sample in content["samples"][1:8]:
        sample["theoretical_reuse"] = 160
        sample["sent_s"], sample["last_s"] = sample["last_s"], sample["sent_s"]
    assert requests_of(content)[0].boundaries == requests_of(alone)[0].boundaries
    assert requests_of(alone)[0].boundaries == (requests_of(alone)[0].length - 5, )


def test_turns_do_not_wait_for_one_another():
    """As in the client's closed loop, whatever the measured run looked like."""
    content = record(1)
    for sample in content["samples"]:
        sample["conversation"] = "one"
    predicted = replay_sim.check(content | {"concurrency": 4}, requests_of(content), cost_model.Fit(TRUTH, [], []),
                                 CHUNK, 8, ROOM, classes=CLASSES)["cache modelled"]
    assert [sample["sent_s"] for sample in predicted.samples[:4]] == [0.0] * 4


@pytest.mark.parametrize(("field", "words"), [("completion_tokens", "request 3: the server did not report the answer"),
                                              ("theoretical_reuse", "request 3: the record does not say how long")])
def test_what_is_not_known_is_not_made_up(tmp_path, capsys, field, words):
    content = record(1)
    content["samples"][3][field] = None
    points = write(tmp_path, "points.json", points_for(TRUTH))
    assert replay_sim.main(["check", str(write(tmp_path, "r.json", summed(content))), "--points", str(points)]) == 1
    assert words in capsys.readouterr().err


def test_prompts_and_ends_of_messages_come_from_the_dataset(tmp_path, capsys):
    from tests.helpers.small_demo import small_demo
    from worklogs import generate_official_like_dataset as generate
    assert generate.main(["--tokenizer", str(small_demo()), "--out", str(tmp_path), "--no-progress", "--requests", "4",
                          "--seed", "3", "--cap", "2K", "--cumulative"]) == 0
    (path, ) = tmp_path.glob("*.jsonl")
    dataset = generate.trace.read(path)
    content = {"dataset": {"name": dataset.name, "sha256": dataset.sha256}, "samples": [
        {"index": item.index, "class": "ok", "prompt_tokens": item.expected_prompt_tokens, "completion_tokens": 3}
        for item in dataset.items]}
    found = requests_of(content, replay_sim.rendered_of(content, path, small_demo()))
    for item, request in zip(dataset.items, found, strict=True):
        print(request.length, request.shared, item.theoretical_reuse, request.boundaries)
        assert request.shared == item.theoretical_reuse // 16 * 16
        assert len(request.boundaries) >= len(item.body["messages"]) - 1
    assert set(found[0].boundaries[:-1]) < set(found[1].boundaries)
    content["samples"][1]["prompt_tokens"] += 1
    with pytest.raises(replay_sim.RequestsError, match="request 1 renders to"):
        replay_sim.rendered_of(content, path, small_demo())
    repeat = {**content, "samples": [dict(sample) for sample in content["samples"]]}
    content["samples"][1]["prompt_tokens"] -= 1
    assert len(replay_sim.rendered_of(content, path, small_demo(), [content])) == 4
    with pytest.raises(replay_sim.RequestsError, match="request 1 renders to"):
        replay_sim.rendered_of(content, path, small_demo(), [repeat])
    content["dataset"]["sha256"] = "other"
    with pytest.raises(replay_sim.RequestsError, match="not the dataset of the run"):
        replay_sim.rendered_of(content, path, small_demo())


# Of one step each, and nothing else: order and steps are then those of a scheduler without a clock.
STEPS = Costs({**dict.fromkeys(TRUTH.values, 0.0), "step": 1.0})
CLASSES = (Policy, CheckpointStore)
ROOM = {"kv_tokens": 1 << 20, "kv_bytes": 1, "device": 1024, "host": 0, "slot_bytes": 0}


def scripted(seed):
    """(token ids, ends of messages) of prompts: two system turns, conversations that go on or leave their last prompt
    somewhere, the same prompt again, and some that nobody has seen."""
    chance = np.random.default_rng(seed)

    def words(count):
        return chance.integers(2, 30_000, count).tolist()
    systems, made = [words(700), words(333)], []
    for _ in range(40):
        which = chance.random()
        if not made or which < 0.3:
            ids, ends = list(systems[chance.integers(2)]), []
            ends.append(len(ids))
        elif which < 0.4:
            made.append(made[chance.integers(len(made))])
            continue
        elif which < 0.8:
            ids, ends = (list(part) for part in made[-1 - chance.integers(min(3, len(made)))])
        else:
            before, _ = made[chance.integers(len(made))]
            ids, ends = list(before[:chance.integers(1, len(before))]), []
        for _ in range(chance.integers(1, 4)):
            ids += words(chance.integers(5, 1200))
            ends.append(len(ids))
        made.append((ids, [end for end in ends if 0 < end < len(ids)]))
    return made


def real_scheduler(made, answers, concurrency, device, host):
    """Cached tokens of each, of our scheduler and a worker that remembers what it holds."""
    engine = FakeEngine(device=device, host=host, length=100_000)
    coming, groups = iter(range(len(made))), {}
    while len(groups) < len(made) or engine.groups:
        while len(engine.groups) < concurrency and (index := next(coming, None)) is not None:
            ids, ends = made[index]
            groups[index] = engine.add(ids, answers[index], boundaries=ends)
        engine.step()
    engine.check()
    return [groups[index].num_cached_tokens for index in range(len(made))]


@pytest.mark.parametrize(("device", "host"), [(200, 0), (24, 0), (12, 24)])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_hits_are_those_of_the_real_scheduler(concurrency, device, host):
    for seed in range(2):
        made = scripted(seed)
        answers = [1 + 7 * index % 40 for index in range(len(made))]
        samples = [{"index": index, "class": "ok", "completion_tokens": answers[index]} for index in range(len(made))]
        requests = requests_of({"samples": samples}, {index: Rendered(ids, tuple(ends))
                                                      for index, (ids, ends) in enumerate(made)})
        cache = Modelled(KvPool(4000), Policy(), CheckpointStore, device, host)
        found, _ = simulate(requests, cache, STEPS, Setting(concurrency, 2048))
        real = real_scheduler(made, answers, concurrency, device, host)
        modelled = [sample["cached_tokens"] for sample in found]
        print("DIFF", [(index, ours, theirs) for index, (ours, theirs) in enumerate(zip(modelled, real, strict=True))
               if ours != theirs], cache.waited, sum(real), sum(map(len, (ids for ids, _ in made))))
        assert modelled == real


def test_ranking_says_what_it_assumes_and_resumes(tmp_path, capsys):
    points = str(replay_sim.Path(replay_sim.__file__).parent / "points_bi_v100.json")
    options = ["rank", "--points", points, "--count", "60", "--cache", "unlimited", "--concurrency", "1,4", "--chunk",
               "8192", "--policy", "fcfs,separate", "--no-progress", "--partial", str(tmp_path / "partial.jsonl")]
    assert replay_sim.main(options) == 0
    text = capsys.readouterr().out
    assert "a row costs half a step:" in text and "assumed: I: eight experts" in text
    assert "which proves nothing" in text and "reported 1560 (+2" in text
    lines = (tmp_path / "partial.jsonl").read_text().splitlines()
    assert len(lines) == 16
    assert replay_sim.main(options) == 0
    assert capsys.readouterr().out == text and (tmp_path / "partial.jsonl").read_text().splitlines() == lines
    best = [json.loads(line)[1] for line in lines if json.loads(line)[1]["alternative"] == "as given"]
    assert max(best, key=lambda found: found["figures"]["weighted"])["concurrency"] == 4


def alike(length, shared, start, index):
    """A request whose first `shared` tokens are those of every other one."""
    keys = np.array([*range(1, shared // 16 + 1), *range(start, start + length // 16 - shared // 16)], np.int64)
    return Request(index, length, 5, keys, np.zeros(0, np.int64), (length - 5, ), -1, shared)


def test_a_prompt_waits_only_until_its_beginning_is_computed():
    """The first one is cut at 2,992 tokens; beside its last 8 there is room for the second, which shares 2,048."""
    cache = Modelled(KvPool(4000), Policy(), CheckpointStore, 64, 0)
    first, second = simulate([alike(3000, 2048, 10_000, 0), alike(4000, 2048, 20_000, 1)], cache, STEPS,
                             Setting(2, 4096))[0]
    assert (second["cached_tokens"], cache.waited) == (2048, 1)
    assert (first["first_s"], second["first_s"]) == (2.0, 2.0)


def test_who_waits_for_whom_is_the_servers_rule():
    """shared_blocks of overlay/prefix_cache on the same prompts, at every progress of the one ahead."""
    def sequence(request, computed=0):
        data = SimpleNamespace(get_num_computed_tokens=lambda: computed)
        return SimpleNamespace(get_len=lambda: request.length, keys=request.keys.tolist(), data=data)

    seen = set()
    for length, shared in ((4000, 2048), (2048, 2048), (2050, 2048), (200, 112), (300, 128)):
        waiting, ahead = alike(length, shared, 20_000, 1), alike(3000, shared, 10_000, 0)
        for hit in (0, 64, 1920, 1936):
            for computed in (0, 16, 1024, 2032, 2047, 2048, 2992):
                blocks = shared_blocks(lambda seq, count: seq.keys[:count], 16, sequence(waiting), hit // 16,
                                       sequence(ahead, computed))
                assert shared_ahead(waiting, hit, ahead, computed) == blocks * 16, (length, shared, hit, computed)
                seen.add(blocks)
    assert {0, 8, 127, 128} <= seen


def test_the_end_of_a_cold_prompt_is_a_step_of_its_own():
    assert (Policy().first, Policy().block_size) == (cost_model.FIRST, cost_model.BLOCK)
    for length in (3000, 3008, 2049, 65, 64, 40):
        last = (length - 1) // 16 * 16
        pieces = [(0, length)] if last < 64 else [(0, min(2048, last))]
        if 2048 < last < length:
            pieces.append((2048, last - 2048))
        if last >= 64:
            pieces.append((last, length - last))
        wanted = TRUTH.before(length) + sum(TRUTH.step(Step([piece])) for piece in pieces)
        features = cost_model.ttft_features(length, 0, 2048, cut=True)
        (sample, ), _ = simulate([one(0, length, 2)], Given({}, cut=True), TRUTH, Setting(1, 2048))
        assert sum(TRUTH.values[name] * amount for name, amount in features.items()) == pytest.approx(wanted), length
        assert sample["first_s"] == pytest.approx(wanted), length
    assert cost_model.ttft_features(3000, 16, 2048, cut=True) == cost_model.ttft_features(3000, 16, 2048)


def test_points_say_whether_the_server_cuts(tmp_path):
    for kind, options, wanted in (("ours", [], True), ("vllm", [], False), ("ours", ["--no-cut"], False)):
        content = record(1)
        content["server"]["kind"] = kind
        path, points = write(tmp_path, "alone.json", content), tmp_path / "points.json"
        assert replay_sim.main(["points", str(path), "--chunk", "2048", "-o", str(points), *options]) == 0
        found = [point for point in json.loads(points.read_text())["points"] if point["what"] == "ttft"]
        assert found and all(point["cut"] is wanted for point in found), kind
        features = cost_model.read(points)[1][0].features
        assert features == cost_model.ttft_features(found[0]["prompt"], found[0]["cached"], 2048, cut=wanted)


# One simulated run, as it comes: enough for what does not follow from their number.
PLAIN = ("--runs", "1", "--jitter", "0")


def checked(validation, content, *options):
    """Exit status of a check of this record."""
    folder, points, _ = validation
    return replay_sim.main(["check", str(write(folder, "changed.json", content)), "--points", str(points), *PLAIN,
                            *options])


def test_a_figure_that_was_measured_as_nothing_is_off(validation, capsys):
    content = record(4, seed=1)
    for sample in content["samples"]:
        sample["cached_tokens"] = 0
    content["summary"] = replay_sim.definitions.summary(content["samples"], content["wall_s"])
    assert content["summary"]["hit_rate"] == 0
    assert checked(validation, content) == replay_sim.OFF
    (verdict, ) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("within")]
    assert "hit_rate" in verdict.split("all but")[1] and "not judged" not in verdict


def test_what_was_not_measured_is_not_judged(validation, capsys, monkeypatch, tmp_path):
    content = record(4, seed=1)
    for sample in content["samples"]:
        sample["cached_tokens"] = None
    content["summary"] = replay_sim.definitions.summary(content["samples"], content["wall_s"])
    monkeypatch.setattr(replay_sim.bench_record.keep, "__defaults__", (tmp_path, ))
    assert checked(validation, content, "--keep") == replay_sim.NOT_JUDGED
    text = capsys.readouterr().out
    print(text)
    assert "within 15%: all; not judged: hit_rate, weighted" in text and "no request reports cached tokens" in text
    kept = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert kept["not_judged"] == ["hit_rate", "weighted"]
    assert all(row["hits as measured"] is None for row in kept["figures"])
    assert "| - |" in tables.replay_sim_check([kept])



def test_cached_tokens_that_some_leave_out_are_0_by_the_platforms_rule(validation, capsys):
    content = record(4, seed=1)
    for sample in content["samples"]:
        sample["cached_tokens"] = sample["cached_tokens"] or None
    assert checked(validation, content) == 0
    assert "8 requests do not report cached tokens: 0, by the platform's rule" in capsys.readouterr().out


def test_a_run_that_points_came_from_proves_nothing(validation, tmp_path, capsys):
    folder, points, _ = validation
    alone = json.loads((folder / "alone.json").read_text())
    for path in (folder / "alone.json", write(tmp_path, "copy.json", alone)):
        assert replay_sim.main(["check", str(path), "--points", str(points)]) == 1
        assert "the points came from this run" in capsys.readouterr().err
    contents = json.loads(points.read_text())
    del contents["records"]
    older = write(tmp_path, "older.json", contents)
    assert replay_sim.main(["check", str(folder / "alone.json"), "--points", str(older)]) == 1
    assert "the points came from this run (alone.json, request 0)" in capsys.readouterr().err


def test_places_of_the_server_are_not_guessed(validation, capsys):
    content = record(4, seed=1)
    content["server"]["command"] = f"serve --max-num-batched-tokens {CHUNK}"
    assert checked(validation, content) == 1
    assert "give --max-num-seqs" in capsys.readouterr().err
    assert checked(validation, content, "--max-num-seqs", "8") == 0


def test_memory_is_as_given_or_said_to_be_assumed(validation, capsys):
    content = record(4, seed=1)
    assert checked(validation, content) == 0 and "cache: ASSUMED" in capsys.readouterr().out
    assert checked(validation, content, "--kv-tokens", "20000", "--checkpoints", "2") == replay_sim.OFF
    text = capsys.readouterr().out
    assert "KV of 20,000 tokens, 2 checkpoints on the device" in text and "hit_rate" in text.split("all but")[1]


RANK = ["rank", "--points", str(replay_sim.Path(replay_sim.__file__).parent / "points_bi_v100.json"), "--count", "40",
        "--chunk", "8192", "--no-progress"]


def test_ranking_gives_every_setting_a_cache_of_its_own(tmp_path, capsys):
    partial = tmp_path / "partial.jsonl"
    contents = json.loads(replay_sim.Path(RANK[2]).read_text())
    points = write(tmp_path, "points.json", {**contents, "alternatives": []})
    assert replay_sim.main([*RANK, "--points", str(points), "--count", "200", "--concurrency", "1,8", "--partial",
                            str(partial)]) == 0
    text = capsys.readouterr().out
    found = [json.loads(line)[1] for line in partial.read_text().splitlines()]
    rates = {one["concurrency"]: one["figures"]["hit_rate"] for one in found if one["alternative"] == "as given"}
    print(rates)
    assert rates[1] != rates[8] and all(one["waits"]["room"] == 0 for one in found)
    alone = tmp_path / "alone.jsonl"
    assert replay_sim.main([*RANK, "--points", str(points), "--count", "200", "--concurrency", "8", "--partial",
                            str(alone)]) == 0
    capsys.readouterr()
    assert json.loads(alone.read_text())[1] == found[1]
    assert f"Hits: {min(rates.values()):.3f} to" in text and "in 0 of 2 outcomes" in text


def test_an_outcome_that_a_kill_cut_off_is_computed_again(tmp_path, capsys):
    partial = tmp_path / "partial.jsonl"
    options = [*RANK, "--cache", "none", "--concurrency", "1,2", "--partial", str(partial)]
    assert replay_sim.main(options) == 0
    text, whole = capsys.readouterr().out, partial.read_text()
    partial.write_text(whole[:-30])
    assert replay_sim.main(options) == 0
    assert capsys.readouterr().out == text and partial.read_text() == whole


def test_what_is_not_reported_is_neither_missed_nor_0():
    setting = {"concurrency": 1, "chunk": 8, "policy": "fcfs", "speculate": 0, "sent": 1, "of": 1}
    figures = {**dict.fromkeys(replay_sim.SHOWN, 1.0), "weighted": None}
    line = replay_sim.outcome_line({**setting, "figures": figures, "gates": [["a", True], ["b", None], ["c", False]]})
    print(line)
    assert "weighted not reported " in line and line.endswith("missed: c; not reported: b")
    costs = {"as given": cost_model.Fit(TRUTH, [], [])}
    (outcome, ) = replay_sim.rank(costs, [Setting(1, 2048)], [], lambda: Given({}), "", {})
    assert [met for _, met in outcome["gates"]] == [None] * len(outcome["gates"])


@pytest.fixture(scope="module")
def repeats(validation):
    """Three runs of the same requests, one of them on a slow afternoon."""
    folder, _, four = validation
    slow = dataclasses.replace(TRUTH, values={name: 1.3 * value for name, value in TRUTH.values.items()})
    return [four, write(folder, "again.json", record(4, seed=2)),
            write(folder, "afternoon.json", record(4, costs=slow, seed=3))]


def test_the_median_of_repeats_is_judged(validation, repeats, capsys, monkeypatch, tmp_path):
    """The slow run alone would be off; the three are not, and the median is that of the three."""
    _, points, four = validation
    assert replay_sim.main(["check", str(repeats[2]), "--points", str(points), *PLAIN]) == replay_sim.OFF
    capsys.readouterr()
    monkeypatch.setattr(replay_sim.bench_record.keep, "__defaults__", (tmp_path, ))
    options = ["--points", str(points), "--runs", "4", "--keep"]
    assert replay_sim.main(["check", *map(str, repeats), *options]) == 0
    text = capsys.readouterr().out
    kept = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert kept["records"] == ["four.json", "again.json", "afternoon.json"]
    assert (kept["runs"], kept["jitter"], len(kept["health"])) == (4, 0.03, 3)
    walls = sorted(json.loads(path.read_text())["wall_s"] for path in repeats)
    wall = kept["figures"][0]
    assert (wall["figure"], wall["measured"], wall["measured_range"]) == ("wall_s", walls[1], [walls[0], walls[2]])
    assert sorted(wall["measured_each"]) == walls
    for arm in replay_sim.replay_check.ARMS:
        low, high = wall["ranges"][arm]
        assert low < wall[arm] < high and wall["overlap"][arm] is (low <= walls[2] and walls[0] <= high)
    assert "Against 3 runs" in text
    assert "by 4 simulated runs of each; the time of each step varies by 3.0% (assumed)" in text
    (line, ) = [line for line in text.splitlines() if line.startswith("  wall_s")]
    assert f"{walls[1]:.4g} ({walls[0]:.4g}..{walls[2]:.4g})" in line and "overlap" in line
    assert "one run only" not in text and "  afternoon.json: client healthy" in text
    head, rule, how, first, *_ = tables.replay_sim_check([kept]).splitlines()
    assert how.startswith("| four.json, again.json, afternoon.json | **how** | median (range) | median of 4 simulated")
    assert first.startswith(f"| 3 repeats | wall_s | {walls[1]:.4g} ({walls[0]:.4g} to {walls[2]:.4g}) | ")
    assert first.endswith(" | within |") and ", overlap)" in first and head.count("|") == first.count("|")
    # Nothing of it is left to chance.
    assert replay_sim.main(["check", *map(str, repeats), *options[:-1]]) == 0
    assert capsys.readouterr().out == text.rpartition("kept as")[0]


def test_without_jitter_a_simulated_run_is_what_it_was(validation, capsys):
    """And there is but one, however many are asked for."""
    _, points, four = validation
    contents, found = cost_model.read(points)
    content = json.loads(four.read_text())
    requests = requests_of(content)
    plain, _ = simulate(requests, Given(replay_sim.hits_of(content)[0]), cost_model.fit(contents, found).costs,
                        Setting(4, CHUNK))
    same = replay_sim.check(content, requests, cost_model.fit(contents, found), CHUNK, 8, ROOM, classes=CLASSES,
                            seed="other")
    assert same["hits as measured"].samples == plain
    texts = []
    for runs in ("1", "9"):
        assert replay_sim.main(["check", str(four), "--points", str(points), "--jitter", "0", "--runs", runs]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "1 simulated run of each; no step varies" in texts[0]
    assert "one run only: how much repeats of it differ is not known" in texts[0] and "overlap" not in texts[0]


def test_steps_vary_as_much_whether_they_are_taken_together_or_not():
    """Of 64 steps of 3 % each: the mean is what they cost, and their sum varies by an eighth of it."""
    def spread(values):
        return np.mean(values), np.std(values)

    paces = [jittered(0.03, str(seed)) for seed in range(2000)]
    together, apart = spread([pace(64) for pace in paces]), spread([sum(pace(1) for _ in range(64)) / 64
                                                                    for pace in paces[:500]])
    print(together, apart)
    for mean, deviation in (together, apart):
        assert mean == pytest.approx(1, abs=0.001) and deviation == pytest.approx(0.03 / 8, rel=0.1)
    assert jittered(0.5, "a")(1) == jittered(0.5, "a")(1) != jittered(0.5, "b")(1)
    assert jittered(0.0, "a")(3) == 1.0 and min(jittered(0.9, str(seed))(1) for seed in range(99)) > 0


@pytest.mark.parametrize(("change", "words"), [
    ({"dataset": {"name": "x", "sha256": "01"}}, "dataset: '00' and '01'"),
    ({"concurrency": 3}, "concurrency: 4 and 3"), ({"mode": "open"}, "mode: 'closed' and 'open'"),
    ({"max_tokens": 5}, "max_tokens: None and 5"),
    ({"set": {"temperature": 0}}, "changed fields: None and {'temperature': 0}"),
    ({"server": {"kind": "ours", "version": "1", "command": "go"}}, "server: 'stub' and 'ours'; its command: 'serve "),
    ({"samples": record(4, seed=2)["samples"][:-1]}, "requests: 32 and 31"),
    ({"samples": record(4, seed=1)["samples"]}, "hold the same samples: give each run once")])
def test_what_is_no_repeat_is_one_line(validation, tmp_path, capsys, change, words):
    _, points, four = validation
    other = write(tmp_path, "other.json", summed({**record(4, seed=2), **change}))
    assert replay_sim.main(["check", str(four), str(other), "--points", str(points)]) == 1
    error = capsys.readouterr().err.strip()
    assert words in error and "four.json and other.json" in error and "\n" not in error, error


def test_every_repeat_is_refused_that_points_came_from(validation, repeats, tmp_path, capsys):
    folder, points, four = validation
    contents = json.loads(points.read_text())
    contents["records"][0]["measured"] = replay_sim.measurement(json.loads(repeats[1].read_text()))
    own = write(tmp_path, "own.json", contents)
    assert replay_sim.main(["check", *map(str, repeats), "--points", str(own), *PLAIN]) == 1
    assert "again.json: the points came from this run (alone.json)" in capsys.readouterr().err
    # A run that ended early, and what became of it: other samples, but not another run.
    part = {**record(1), "run": "a1", "sittings": 1, "ended_early": "gone"}
    rest = {**record(1, noise=0.03), "run": "a1", "sittings": 2}
    paths = [str(write(tmp_path, name, one)) for name, one in (("part.json", part), ("rest.json", rest))]
    assert replay_sim.main(["points", paths[0], "--chunk", "2048", "-o", str(own), "--any-health"]) == 0
    assert replay_sim.main(["check", paths[1], "--points", str(own), *PLAIN]) == 1
    assert "rest.json: the points came from this run (part.json)" in capsys.readouterr().err
    assert replay_sim.main(["check", *paths, "--points", str(points), *PLAIN]) == 1
    assert "part.json and rest.json are both of run a1" in capsys.readouterr().err


def test_a_figure_that_one_repeat_does_not_know_is_not_judged(validation, tmp_path, capsys):
    _, points, four = validation
    content = record(4, seed=2)
    for sample in content["samples"]:
        sample["cached_tokens"] = None
    content["summary"] = replay_sim.definitions.summary(content["samples"], content["wall_s"])
    other = write(tmp_path, "silent.json", {**content, "commit": "1234567890"})
    words = ["check", str(four), str(other), "--points", str(points), "--runs", "2"]
    assert replay_sim.main(words) == replay_sim.NOT_JUDGED
    text = capsys.readouterr().out
    assert "all; not judged: hit_rate, weighted" in text and "of several commits: abcdef0, 1234567" in text
    assert "no request reports cached tokens in one of the runs: not predicted with the hits as measured" in text


def test_several_runs_of_one_server_make_the_costs_a_mean_of_the_hours(tmp_path, capsys):
    """Of a run a tenth faster and one a tenth slower than the truth, and neither is taken twice."""
    paths = {}
    for name, factor in (("fast", 0.9), ("slow", 1.1)):
        costs = dataclasses.replace(TRUTH, values={cost: factor * value for cost, value in TRUTH.values.items()})
        paths[name] = str(write(tmp_path, f"{name}.json", record(1, costs=costs, noise=0.01)))
    points = tmp_path / "points.json"
    took = {}
    for names in (("fast", ), ("slow", ), ("fast", "slow")):
        words = ["points", *(paths[name] for name in names), "--chunk", str(CHUNK), "-o", str(points)]
        assert replay_sim.main(words) == 0
        costs = cost_model.fit(*cost_model.read(points)).costs
        took[names] = costs.step(Step([(0, 2048)])), costs.step(Step(decode=[4000]))
    print(took)
    for fast, slow, both, true in zip(*took.values(), (TRUTH.step(Step([(0, 2048)])), TRUTH.step(Step(decode=[4000]))),
                                      strict=True):
        assert fast < 0.95 * true and slow > 1.05 * true and both == pytest.approx(true, rel=0.03)
    contents = json.loads(points.read_text())
    assert [one["name"] for one in contents["records"]] == ["fast.json", "slow.json"]
    assert {point["source"].split(",")[0] for point in contents["points"]} == {"fast.json", "slow.json"}
    capsys.readouterr()
    other = record(1, version="2")
    other["server"]["command"] = "serve --max-num-batched-tokens 512"
    for path, words in ((write(tmp_path, "copy.json", json.loads((tmp_path / "fast.json").read_text())),
                         "fast.json and copy.json hold the same samples"),
                        (write(tmp_path, "other.json", other), "fast.json and other.json are not of one server: its")):
        assert replay_sim.main(["points", paths["fast"], str(path), "--chunk", "1", "-o", str(points)]) == 1
        error = capsys.readouterr().err.strip()
        assert words in error and "\n" not in error


@pytest.mark.parametrize(("change", "words"), [
    ({"client": {"healthy": False, "loop_lag_ms": {"max": 81961.8}}}, "the client was slow, by up to 81961.8 ms"),
    ({"others_cores": 0.4}, "others used 0.4 cores"), ({"ended_early": "gone"}, "it ended early: gone"),
    ({"sittings": 2}, "it was measured in 2 sittings")])
def test_disturbed_runs_make_no_points_and_check_nothing(validation, tmp_path, capsys, change, words):
    """A client that stood still for a minute, and so its points, fitted without a word."""
    one, points, four = validation
    odd = [str(write(tmp_path, f"odd{at}.json", {**record(at, seed=9), **change})) for at in (1, 4)]
    out = str(tmp_path / "points.json")
    for command in (["points", odd[0], "--chunk", str(CHUNK), "-o", out],
                    ["check", odd[1], "--points", str(points), "--runs", "1"],
                    ["check", str(four), odd[1], "--points", str(points), "--runs", "1"]):
        assert replay_sim.main(command) == 1
        error = capsys.readouterr().err.strip()
        assert f".json was disturbed: {words} (--any-health" in error and "\n" not in error, error
    assert replay_sim.main(["points", odd[0], "--chunk", str(CHUNK), "-o", out, "--any-health"]) == 0
    assert f"odd1.json: DISTURBED: {words}" in capsys.readouterr().out
    assert json.loads((tmp_path / "points.json").read_text())["records"][0]["disturbed"] == [words]
    assert replay_sim.main(["check", odd[1], "--points", str(points), "--any-health", "--runs", "1"]) in (0, 3)
    assert f"DISTURBED: {words}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [
    ["points", "x", "-o", "y", "--chunk", "0"], ["points", "x", "-o", "y", "--chunk", "8", "--top-k", "1"],
    ["check", "x", "--points", "y", "--chunk", "-1"], ["check", "x", "--points", "y", "--max-num-seqs", "0"],
    ["check", "x", "--points", "y", "--kv-tokens", "-5"], ["check", "x", "--points", "y", "--limit", "nan"],
    ["rank", "--points", "y", "--count", "0"], ["rank", "--points", "y", "--chunk", ""],
    ["rank", "--points", "y", "--draft", "-1"], ["rank", "--points", "y", "--draft", "nan"]])
def test_options_that_would_give_nonsense_are_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        replay_sim.parse(words)
    assert ended.value.code == 2 and words[-2] in capsys.readouterr().err


@pytest.mark.parametrize(("change", "words"), [({"chunk": 0}, "point 1: a chunk of 0 tokens"),
                                               ({"chunk": -5}, "a chunk of -5"), ({"chunk": "2K"}, "a chunk of '2K'"),
                                               ({"top_k": 9, "experts": 8}, "top_k 9 of 8 experts")])
def test_a_points_file_with_an_impossible_server_is_one_line(tmp_path, capsys, change, words):
    """A chunk below 1 never came to a prompt's end."""
    points = points_for(TRUTH)
    path = write(tmp_path, "points.json", {**points, **change})
    assert replay_sim.main(["fit", str(path)]) == 1
    error = capsys.readouterr().err.strip()
    assert words in error and "\n" not in error
