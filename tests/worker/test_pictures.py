"""Pictures through the engine, with a toy tower over an attention-only model, so that the prefix cache takes part."""
import pytest

from tests.helpers import toy_pictures
from tests.helpers.pictures import PLACEHOLDER, edges, picture, pictured, watch_towers
from tests.helpers.tiny_models import add, assert_same, drain, greedy, make_engine, run
from vllm.overlay.engine.step_failure import StepFailed
from vllm.overlay.pictures.book import PictureBook
from vllm.overlay.pictures.hashing import hash_ids

TOKENS = 8
# 15, 16, 1 and 6 tokens. The first three share a text of 20; the second differs from the first by one picture's pixels.
A, B, C, D = picture(6, 10), picture(8, 8), picture(2, 2), picture(4, 6)
PROMPTS = [pictured(20, A, 5, B, 9), pictured(20, picture(6, 10, seed=1), 5, B, 9), pictured(20, A, 40),
           pictured(C, 3, D, D), pictured(33), pictured(1, B, B, picture(8, 8, seed=2))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        toy_pictures.register(patch)
        yield toy_pictures.make(tmp_path_factory.mktemp("toy-pictures"))


@pytest.fixture(scope="module")
def plain(model):
    """Each prompt alone and whole."""
    return run(make_engine(model, max_num_batched_tokens=1024), PROMPTS, greedy(TOKENS), together=False)


@pytest.fixture(scope="module")
def cached(model):
    return make_engine(model, max_num_batched_tokens=1024, enable_prefix_caching=True)


def runner_of(engine):
    return engine.model_executor.driver_worker.model_runner


@pytest.fixture
def towers(cached, monkeypatch):
    return watch_towers(runner_of(cached).model, monkeypatch)


def parted(outputs, expected):
    try:
        return assert_same(outputs, expected) > 0
    except AssertionError:
        return True


def test_pictures_make_a_difference(plain):
    assert parted(plain[:1], plain[1:2]), "other pixels at one place give other tokens"


@pytest.mark.parametrize("budget", [1, 7, 24, 1024])
def test_pieces_and_batches(model, plain, budget, monkeypatch):
    engine = make_engine(model, max_num_batched_tokens=budget, max_num_seqs=min(budget, 4))
    calls = watch_towers(runner_of(engine).model, monkeypatch)
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)
    computed = sum(map(len, calls))
    assert 6 <= computed <= 11, f"6 pictures, 11 places; equal ones of a step once: {calls}"
    assert not len(runner_of(engine).pictures) and not engine.scheduler[0].pictures.num_held


def test_cold_and_warm(cached, plain, towers):
    assert_same(run(cached, PROMPTS, greedy(TOKENS), together=False), plain)
    cold = sum(map(len, towers))
    outputs = run(cached, PROMPTS, greedy(TOKENS))
    assert_same(outputs, plain)
    found = [output.num_cached_tokens for output in outputs]
    lengths = [len(prompt["prompt_token_ids"]) for prompt in PROMPTS]
    assert found == [(length - 1) // 16 * 16 for length in lengths], (found, lengths)
    assert (cold, sum(map(len, towers)) - cold) == (9, 3), "pictures of a block that is not full are seen again"


def test_other_pictures_behind_equal_tokens_share_nothing(cached, plain, towers):
    """The text before them is shared; equal pictures behind an equal text are shared too."""
    first = pictured(32, picture(8, 8, seed=7), 17)
    other = pictured(32, picture(8, 8, seed=8), 17)
    assert first["prompt_token_ids"] == other["prompt_token_ids"]
    outputs = [run(cached, [prompt], greedy(TOKENS))[0] for prompt in (first, other, first, other)]
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 64, 64]
    assert parted(outputs[:1], outputs[1:2])
    assert_same(outputs[2:], outputs[:2])
    assert towers == [[(8, 8)], [(8, 8)]], "a hit that covers a picture never computes it"


def test_without_the_hash_the_law_breaks(cached, monkeypatch):
    monkeypatch.setattr("vllm.overlay.pictures.prompt_pictures.hash_ids",
                        lambda ids, spans, start, end: hash_ids(ids, (), start, end))
    outputs = [run(cached, [pictured(32, picture(8, 8, seed=seed), 17)], greedy(TOKENS))[0] for seed in (17, 18)]
    assert outputs[1].num_cached_tokens == 64
    assert not parted(outputs[:1], outputs[1:]), "the second was answered for the first one's picture"


def test_a_hit_that_ends_inside_a_picture(model, cached, towers):
    """It is computed whole, and what is missing of it is placed."""
    shown = picture(8, 10, seed=9)
    prompt = pictured(20, shown, 20)
    # The last full block of this one ends 12 tokens into the picture's 20.
    run(cached, [pictured(20, shown, 1)], greedy(1))
    found = run(cached, [prompt], greedy(TOKENS))
    assert found[0].num_cached_tokens == 32 and towers == [[(8, 10)]] * 2
    assert_same(found, run(make_engine(model, max_num_batched_tokens=1024), [prompt], greedy(TOKENS)))


def test_aborted_in_the_middle_of_a_picture(model, plain):
    engine = make_engine(model, max_num_batched_tokens=25, enable_prefix_caching=True)
    add(engine, "leaves", PROMPTS[0], greedy(TOKENS))
    engine.step()
    assert len(runner_of(engine).pictures) == 1
    engine.abort_request("leaves")
    assert not engine.scheduler[0].pictures.num_held
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)
    assert not len(runner_of(engine).pictures)


@pytest.mark.parametrize("seed", [0, 1])
def test_preempted_in_the_middle_of_a_picture(model, plain, seed, monkeypatch):
    import random
    random.seed(seed)
    begun = []
    forget_sequence = PictureBook.forget

    def watched(self, seq_id):
        begun.extend(seq_id for users in self._held.values() for user, _ in users if user == seq_id)
        forget_sequence(self, seq_id)

    monkeypatch.setattr(PictureBook, "forget", watched)
    engine = make_engine(model, max_num_batched_tokens=13, max_num_seqs=4)
    scheduler = engine.scheduler[0]
    scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = True, 30
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)
    assert scheduler.num_cumulative_preemption > 10 and begun, "nobody was in the middle of a picture"
    assert not len(runner_of(engine).pictures)


def test_a_failed_tower(model, plain, monkeypatch):
    """It fails the requests of its step; the others and the next ones are as ever."""
    engine = make_engine(model, max_num_batched_tokens=40)
    tower = runner_of(engine).model

    def fails(pixels, grids):
        raise RuntimeError("no luck")

    add(engine, "stays", PROMPTS[4], greedy(TOKENS))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(tower, "embed_pictures", fails)
        add(engine, "fails", PROMPTS[0], greedy(TOKENS))
        with pytest.raises(StepFailed, match="no luck") as caught:
            engine.step()
    assert set(caught.value.request_ids) == {"stays", "fails"}
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)


def test_positions_reach_the_model(model):
    """A step with a pictured prompt has three rows of them, also for the text beside it; other steps have one."""
    engine = make_engine(model, max_num_batched_tokens=64)
    seen = runner_of(engine).model.positions
    del seen[:]
    add(engine, "text", pictured(4), greedy(3))
    engine.step()
    add(engine, "picture", pictured(2, D, 2), greedy(2))
    engine.step()
    engine.step()
    whole = [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]]
    assert [one.tolist() for one in seen] == [[0, 1, 2, 3], [[*row, 4] for row in whole],
                                              [[5, 7]] * 3]


def test_bad_requests_are_refused_and_the_engine_lives(model, plain):
    engine = make_engine(model, max_num_batched_tokens=64, limit_mm_per_prompt={"image": 2})
    wrong = (({"prompt_token_ids": [5, PLACEHOLDER, 5]}, "1 picture placeholders .*, its 0 pictures need 0"),
             ({"prompt_token_ids": [5], "multi_modal_data": {"image": "cat.png"}}, "or send pictures to the server"),
             (PROMPTS[5], "the request has 3 pictures; --limit-mm-per-prompt allows 2"))
    for number, (prompt, message) in enumerate(wrong):
        for samples in (1, 2):
            with pytest.raises(ValueError, match=message):
                add(engine, f"wrong{number}{samples}", prompt, greedy(TOKENS, n=samples))
    assert not engine.has_unfinished_requests()
    assert_same(run(engine, PROMPTS[:3], greedy(TOKENS)), plain[:3])


def test_a_model_without_a_tower_refuses_pictures(qwen2):
    engine = make_engine(qwen2)
    with pytest.raises(ValueError, match="^this model takes no pictures, but the request has multi_modal_data$"):
        add(engine, "one", PROMPTS[0], greedy(1))
    assert engine.scheduler[0].pictures is None
    with pytest.raises(ValueError, match="`limit_mm_per_prompt` is only supported for multimodal models"):
        make_engine(qwen2, limit_mm_per_prompt={"image": 2})


def test_samples_of_one_prompt(model, plain, monkeypatch):
    engine = make_engine(model, max_num_batched_tokens=64)
    calls = watch_towers(runner_of(engine).model, monkeypatch)
    add(engine, "three", PROMPTS[3], greedy(TOKENS, n=3))
    output = drain(engine)["three"]
    assert len(output.outputs) == 3
    for choice in output.outputs:
        assert list(choice.token_ids) == list(plain[3].outputs[0].token_ids)
    assert calls == [[(2, 2), (4, 6)]], "all three prompts in one step: equal pictures once"


@pytest.mark.parametrize("which", [0, 3, 5])
def test_cut_at_every_edge(model, plain, which, monkeypatch):
    engine = make_engine(model, max_num_batched_tokens=1024, max_num_seqs=1)
    for cut in edges(PROMPTS[which]):
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler_config, "max_num_batched_tokens", cut)
            add(engine, "cut", PROMPTS[which], greedy(TOKENS))
            engine.step()
        assert_same([drain(engine)["cut"]], [plain[which]])
