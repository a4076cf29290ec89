"""Same request, same tokens, with pictures: the hybrid model and its vision tower through the engine, however prompts
are cut, mixed, preempted, sampled or shared by ranks. The negative controls show that a picture out of place is
noticed."""
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pictures import PLACEHOLDER, VISION, edges, picture, pictured, watch_towers
from tests.helpers.tiny_models import add, assert_same, drain, environment, greedy, make_engine, run
from tests.models.conftest import flatter
from tests.models.shapes import moe, text
from vllm import SamplingParams
from vllm.overlay.engine.step_failure import StepFailed
from vllm.overlay.pictures.picture_step import PictureStep
from worklogs.random_checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
NEW = 8
ALL = 1024
HIDDEN = 64
# Wide, high and tiny ones; side by side; at the very start and the very end; the same one twice; text only.
A, B, C, D = picture(4, 12), picture(10, 4), picture(2, 2), picture(6, 6)
PROMPTS = [pictured(5, A, 7, B, 1, C, 9), pictured(D, 3), pictured(40), pictured(2, B, D), pictured(1, A, 2, A, C),
           pictured(3), pictured(70, picture(8, 8), 70)]


def write_model(folder: Path) -> Path:
    language = {**text(HIDDEN, 4, 4, (4, 2, 32), (2, 4, 16, 16), 4, 0.5, **moe(4, 2, 24, 40)), "dtype": "float32"}
    config = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
              "image_token_id": PLACEHOLDER, "tie_word_embeddings": False, "text_config": language,
              "vision_config": {**VISION, "out_hidden_size": HIDDEN}}
    write_checkpoint(folder, config, seed=4, adjust=flatter)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("pictures") / "checkpoint")


@pytest.fixture(scope="module")
def engine(model):
    return make_engine(model, max_num_batched_tokens=ALL)


@pytest.fixture
def budget(engine, monkeypatch):
    """Sets the tokens of a step."""
    return lambda tokens: monkeypatch.setattr(engine.scheduler_config, "max_num_batched_tokens", tokens)


@pytest.fixture(scope="module")
def alone(engine):
    """Every prompt whole and alone."""
    return run(engine, PROMPTS, greedy(NEW), together=False)


@pytest.fixture
def towers(engine, monkeypatch):
    return watch_towers(runner_of(engine).model, monkeypatch)


def runner_of(engine):
    return engine.model_executor.driver_worker.model_runner


def assert_nothing_is_held(engine):
    assert not engine.scheduler[0].pictures.num_held and not len(runner_of(engine).pictures)


def test_output_is_alive(alone):
    tokens = [token for output in alone for token in output.outputs[0].token_ids]
    assert len(set(tokens)) > 20, f"the model repeats itself, so equal tokens show little: {tokens}"


@pytest.mark.parametrize("chunk", [1, 2, 3, 10, 16, 64])
def test_chunk_sizes(engine, budget, alone, towers, chunk):
    budget(chunk)
    assert_same(run(engine, PROMPTS, greedy(NEW), together=False), alone)
    computed = sum(map(len, towers))
    assert 9 <= computed <= 10, f"each picture of a prompt once, a second A behind the first perhaps again: {towers}"
    assert_nothing_is_held(engine)


def test_a_missing_checkpoint_while_pictures_are_under_way(model, alone):
    """A step begins anew in which one prompt stands in the middle of a picture, and another was to be restored behind
    one: every picture is where it belongs, and none is kept for ever."""
    engine = make_engine(model, max_num_batched_tokens=ALL, enable_prefix_caching=True)
    failures = 0
    for _ in range(3):
        assert_same(run(engine, PROMPTS, greedy(NEW)), alone)
        engine.scheduler_config.max_num_batched_tokens = 13
        add(engine, "halfway", PROMPTS[0], greedy(NEW))
        engine.step()
        assert engine.scheduler[0].pictures.num_held
        engine.scheduler_config.max_num_batched_tokens = ALL
        runner_of(engine).state_pool._held.clear()
        add(engine, "restored", PROMPTS[6], greedy(NEW))
        assert not engine.step() and not engine.scheduler[0].running and len(engine.scheduler[0].waiting) == 2
        found = drain(engine)
        assert_same([found["halfway"], found["restored"]], [alone[0], alone[6]])
        assert engine.scheduler[0].cache_stats.failures > failures
        failures = engine.scheduler[0].cache_stats.failures
        assert_nothing_is_held(engine)


@pytest.mark.parametrize("which", [0, 1, 3, 4])
def test_cut_at_every_edge(engine, alone, which, monkeypatch):
    """In two at, one before and one after where a picture begins and ends; and in three, so that a piece of one token
    lies there."""
    cuts = edges(PROMPTS[which])
    for first, second in [(cut, ALL) for cut in cuts] + [(cut, 1) for cut in cuts[::2]]:
        for tokens in (first, second):
            monkeypatch.setattr(engine.scheduler_config, "max_num_batched_tokens", tokens)
            if tokens == first:
                add(engine, "cut", PROMPTS[which], greedy(NEW))
            done = engine.step()
        monkeypatch.setattr(engine.scheduler_config, "max_num_batched_tokens", ALL)
        found = {**{output.request_id: output for output in done}, **drain(engine)}
        assert_same([found["cut"]], [alone[which]])


@pytest.mark.parametrize("chunk", [13, 50, ALL])
def test_together(engine, budget, alone, towers, chunk):
    """With text only and with other pictures in one step."""
    budget(chunk)
    for order in (1, -1):
        assert_same(run(engine, PROMPTS[::order], greedy(NEW)), alone[::order])
    if chunk == ALL:
        assert [len(call) for call in towers] == [5] * 2, "all prompts in one step: A, B, C, D and one more, once each"
    assert_nothing_is_held(engine)


def test_preempted(model, alone):
    random.seed(3)
    small = make_engine(model, max_num_batched_tokens=17, max_num_seqs=4)
    scheduler = small.scheduler[0]
    in_the_middle = []
    preempt = scheduler._preempt
    scheduler._preempt = lambda *a, **k: (in_the_middle.append(scheduler.pictures.num_held), preempt(*a, **k))[1]
    scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = True, 30
    assert_same(run(small, PROMPTS, greedy(NEW)), alone)
    assert scheduler.num_cumulative_preemption > 15 and sum(in_the_middle) > 2, in_the_middle
    assert_nothing_is_held(small)


def test_aborted_in_the_middle_of_a_picture(engine, budget, alone):
    budget(9)
    for number in range(3):
        add(engine, f"gone{number}", PROMPTS[number], greedy(NEW))
    engine.step()
    assert len(runner_of(engine).pictures) == 1
    for number in range(3):
        engine.abort_request(f"gone{number}")
    budget(50)
    assert_same(run(engine, PROMPTS, greedy(NEW)), alone)
    assert_nothing_is_held(engine)


def test_a_failed_step(engine, budget, alone, monkeypatch):
    """The tower has computed, and the language model fails."""
    budget(9)
    real = runner_of(engine).model.forward
    add(engine, "fails", PROMPTS[0], greedy(NEW))
    with monkeypatch.context() as patch:
        patch.setattr(runner_of(engine).model, "forward", lambda *a, **k: real())
        with pytest.raises(StepFailed):
            engine.step()
    budget(50)
    assert_same(run(engine, PROMPTS, greedy(NEW)), alone)
    assert_nothing_is_held(engine)


def test_sampled_three_times_alike(engine, budget):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=NEW, ignore_eos=True, logprobs=2, detokenize=False)
    runs = []
    for chunk in (ALL, 11, 40):
        budget(chunk)
        runs.append(run(engine, PROMPTS, params, together=chunk != 11))
    for other in runs[1:]:
        assert [one.outputs[0].token_ids for one in other] == [one.outputs[0].token_ids for one in runs[0]]


def test_three_samples_of_one_prompt(engine, budget):
    """n = 3 is three requests with seeds s, s + 1, s + 2."""
    budget(30)
    fields = {"temperature": 1.0, "max_tokens": NEW, "ignore_eos": True, "logprobs": 2, "detokenize": False}
    single = [run(engine, [PROMPTS[0]], SamplingParams(seed=seed, **fields))[0].outputs[0] for seed in (11, 12, 13)]
    add(engine, "three", PROMPTS[0], SamplingParams(n=3, seed=11, **fields))
    found = drain(engine)["three"].outputs
    assert [list(choice.token_ids) for choice in found] == [list(one.token_ids) for one in single]
    assert len({tuple(choice.token_ids) for choice in found}) == 3


def test_text_alone_is_plain_rotary_to_the_bit(engine, alone, monkeypatch):
    """A text-only request runs on one row of positions; on three equal ones it gives the same bits."""
    forward, shapes = runner_of(engine).model.forward, []

    def threefold(input_ids, positions, *args, **kwargs):
        shapes.append(positions.dim())
        return forward(input_ids, positions.expand(3, -1).contiguous(), *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(runner_of(engine).model, "forward", threefold)
        found = run(engine, [PROMPTS[2]], greedy(NEW))[0].outputs[0]
    assert set(shapes) == {1}
    expected = alone[2].outputs[0]
    assert found.token_ids == expected.token_ids
    assert [{token: entry.logprob for token, entry in place.items()} for place in found.logprobs] == [
        {token: entry.logprob for token, entry in place.items()} for place in expected.logprobs]


def differs(outputs, expected):
    try:
        return assert_same(outputs, expected) > 0
    except AssertionError:
        return True


def test_a_row_off_is_noticed(engine, alone, monkeypatch):
    place = PictureStep.place
    monkeypatch.setattr(PictureStep, "place", lambda self, x: place(
        PictureStep(tuple((max(0, row - 1), rows) for row, rows in self.placements)), x))
    for index in (0, 3, 6):
        assert differs(run(engine, [PROMPTS[index]], greedy(NEW)), [alone[index]]), index


def test_a_swapped_picture_is_noticed(engine, alone):
    """Equal placeholders, another picture of the same grid in place of one of three; and all in other places."""
    assert differs(run(engine, [pictured(5, A, 7, B, 1, picture(2, 2, seed=1), 9)], greedy(NEW)), alone[:1])
    first, second = picture(6, 6, seed=1), picture(6, 6, seed=2)
    one, other = (run(engine, [pictured(5, *both, 7)], greedy(NEW)) for both in ((first, second), (second, first)))
    assert differs(one, other)


def test_positions_are_noticed(engine, alone, monkeypatch):
    """A picture whose rows and columns are taken for one another."""
    from vllm.overlay.pictures.positions import PictureLayout
    positions = PictureLayout.positions
    monkeypatch.setattr(PictureLayout, "positions", lambda self, start, end: positions(self, start, end)[[0, 2, 1]])
    assert differs(run(engine, [PROMPTS[0]], greedy(NEW)), alone[:1])


def main(folder: str, results: str) -> None:
    """Two ranks: in pieces that cut pictures, then preempted."""
    two = make_engine(Path(folder), tensor_parallel_size=2, max_num_batched_tokens=21, max_num_seqs=4)
    runs = [run(two, PROMPTS, greedy(NEW))]
    scheduler = two.scheduler[0]
    scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = True, 10
    runs.append(run(two, PROMPTS, greedy(NEW)))
    Path(results).write_bytes(pickle.dumps((runs, scheduler.num_cumulative_preemption)))


def test_two_ranks(model, alone, tmp_path):
    results = tmp_path / "results"
    done = subprocess.run([sys.executable, "-m", "tests.models.test_picture_laws", str(model), str(results)], cwd=ROOT,
                          text=True, timeout=250, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and results.exists(), done.stdout[-6000:]
    runs, preempted = pickle.loads(results.read_bytes())
    assert preempted >= 5
    for found in runs:
        assert_same(found, alone)


if __name__ == "__main__":
    main(*sys.argv[1:])
