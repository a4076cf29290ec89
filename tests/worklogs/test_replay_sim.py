"""The replay simulation: costs come back from points, engine time adds up, and a run on a server whose costs are known
is predicted."""
import dataclasses
import json

import numpy as np
import pytest

from tests.worklogs.formal_record import CHUNK, TRUTH, conversations, record, write
from worklogs import cost_model, replay_sim
from worklogs.cost_model import Step
from worklogs.engine_model import Given, Setting, simulate
from worklogs.replay_trace import Request


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
    assert replay_sim.main(["check", str(four), "--points", str(points)]) == 0
    text = capsys.readouterr().out
    print(text)
    assert "within 15%: all\n" in text and "chunk 2,048, max_num_seqs 8" in text


def test_wrong_costs_are_noticed(validation, capsys):
    folder, _, _ = validation
    slow = dataclasses.replace(TRUTH, values={name: 1.5 * value for name, value in TRUTH.values.items()})
    points = write(folder, "slow.json", points_for(slow))
    assert replay_sim.main(["check", str(folder / "four.json"), "--points", str(points)]) == replay_sim.OFF
    assert "all but wall_s" in capsys.readouterr().out


def test_points_of_a_concurrent_run_are_refused(validation, capsys):
    folder, _, four = validation
    assert replay_sim.main(["points", str(four), "--chunk", "1", "-o", str(folder / "none.json")]) == 1
    assert "4 requests at a time" in capsys.readouterr().err


def test_requests_of_a_record_share_what_was_possible():
    wanted, _ = conversations()
    found, hits, after = replay_sim.requests_of(record(1))
    for one_wanted, request in zip(wanted, found, strict=True):
        assert (request.length, request.shared) == (one_wanted.length, one_wanted.shared)
        if request.parent >= 0:
            blocks = request.shared // 16
            assert (request.keys[:blocks] == found[request.parent].keys[:blocks]).all()
    assert hits == {request.index: request.shared for request in wanted} and len(after) == 24


def test_first_turns_share_a_system_turn():
    """Conversations that begin alike: each first turn but the first repeats 160 tokens of it."""
    content = record(1)
    for sample in content["samples"]:
        if sample["turn"] == 0 and sample["index"]:
            sample["theoretical_reuse"] = 160
    found, _, _ = replay_sim.requests_of(content)
    for request in found[1:8]:
        assert request.parent == 0 and (request.keys[:10] == found[0].keys[:10]).all()
        assert request.keys[10] != found[0].keys[10]
    assert 160 in found[0].boundaries and found[0].shared == 0


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
