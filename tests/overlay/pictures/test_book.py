"""The scheduler's book and a rank's store: computed once, held from the first token to the last, dropped in time."""
import pickle
import random
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.pictures import MERGE, SETTINGS, picture, pictured
from vllm.overlay.pictures.book import PictureBook
from vllm.overlay.pictures.orders import PictureOrders
from vllm.overlay.pictures.picture_step import PictureStep, get_picture_step, set_picture_step
from vllm.overlay.pictures.prompt_pictures import read_pictures
from vllm.overlay.pictures.store import PictureStore

HIDDEN = 5
A, B, C = picture(4, 6), picture(8, 2), picture(2, 2)       # 6, 4 and 1 tokens


class Tower:
    """embed_pictures: every embedding tells its picture and its place."""

    def __init__(self):
        self.calls = []
        self.missing = 0

    def embed_pictures(self, pixels, grids):
        self.calls.append([tuple(grid) for grid in grids])
        found = torch.cat([self.of(one) for one in pixels])
        sizes = [one.shape[0] // MERGE**2 for one in pixels]
        return [part[self.missing:] for part in found.split(sizes)]

    @staticmethod
    def of(pixels):
        """[tokens, HIDDEN]"""
        return pixels.float().view(-1, MERGE**2 * pixels[0].numel())[:, :HIDDEN].clone()


class Ranks:
    """A book with one rank that carries out what it says, and checks it."""

    def __init__(self):
        self.book, self.store, self.tower = PictureBook(), PictureStore(), Tower()

    def step(self, *rows):
        """rows: (sequence, start, count). Returns what each token of the step shows: (sequence, index) or None."""
        orders = getattr(self.book.step(rows), "orders", None)
        if orders is None:
            return
        # As the orders reach another rank.
        sent, pixels = pickle.loads(pickle.dumps(orders.without_pixels()))
        placed = torch.full((sum(count for *_, count in rows), HIDDEN), -1.0)
        self.store.begin(sent.with_pixels(pixels), self.tower).place(placed)
        self.store.end(sent)
        self.check(rows, placed)

    @staticmethod
    def check(rows, placed):
        at = 0
        for seq, start, count in rows:
            expected = torch.full((count, HIDDEN), -1.0)
            for one in seq.pictures.pictures if seq.pictures else ():
                shown = Tower.of(one.pixels)
                for place in range(max(start, one.offset), min(start + count, one.offset + len(shown))):
                    expected[place - start] = shown[place - one.offset]
            assert torch.equal(placed[at:at + count], expected), (seq.seq_id, start, count)
            at += count


def sequence(seq_id, *parts):
    return SimpleNamespace(seq_id=seq_id, pictures=read_pictures(pictured(*parts), SETTINGS))


def test_a_picture_that_spans_pieces_is_computed_once():
    ranks = Ranks()
    one = sequence(1, 3, A, 2, B, 1)                  # A at 3..8, B at 11..14
    for start, count, calls, held in ((0, 3, 0, 0), (3, 1, 1, 1), (4, 4, 1, 1), (8, 1, 1, 0), (9, 3, 2, 1),
                                      (12, 4, 2, 0), (16, 1, 2, 0)):
        ranks.step((one, start, count))
        assert (len(ranks.tower.calls), len(ranks.store), ranks.book.num_held) == (calls, held, held), start
    assert ranks.tower.calls == [[(4, 6)], [(8, 2)]]


def test_a_step_without_pictures_orders_nothing():
    book, plain, one = PictureBook(), sequence(1, 9), sequence(2, 1, C, 1)
    assert book.step([(plain, 0, 9)]) is None
    decoding = book.step([(plain, 9, 1), (one, 3, 1)])
    assert decoding.orders is None and decoding.layouts == [(1, one.pictures.layout)]


def test_equal_pictures_of_a_step_are_computed_once_and_all_at_once():
    ranks = Ranks()
    ranks.step((sequence(1, 1, A, 1, B, A), 0, 18), (sequence(2, A, C), 0, 7), (sequence(3, 4), 0, 4))
    assert ranks.tower.calls == [[(4, 6), (8, 2), (2, 2)]] and not len(ranks.store)


def test_a_held_picture_serves_whoever_comes():
    ranks = Ranks()
    one, two = sequence(1, 1, A, 4), sequence(2, 2, A, B)
    ranks.step((one, 0, 3))
    ranks.step((two, 0, 6))
    ranks.step((one, 3, 8))
    assert ranks.tower.calls == [[(4, 6)]] and len(ranks.store) == 1, "the second is still in the middle of it"
    ranks.step((two, 6, 6))
    assert ranks.tower.calls == [[(4, 6)], [(8, 2)]] and not len(ranks.store)


def test_the_same_picture_twice_in_one_prompt():
    """Between two pieces of the first, and with the second begun before the first ended: in one step."""
    ranks = Ranks()
    one = sequence(1, A, A, A)
    for start, count in ((0, 2), (2, 12), (14, 4)):
        ranks.step((one, start, count))
    assert ranks.tower.calls == [[(4, 6)]] and not len(ranks.store)


def test_a_prefix_hit():
    """One that covers a picture never computes it; one that ends inside computes it and places the rest."""
    ranks = Ranks()
    one = sequence(1, 1, A, 1, B)
    ranks.step((one, 9, 3))
    assert ranks.tower.calls == [[(8, 2)]] and not len(ranks.store)


@pytest.mark.parametrize("again", [False, True])
def test_aborted_or_preempted_in_the_middle(again):
    ranks = Ranks()
    one, other, plain = sequence(1, 1, A), sequence(2, 1, B, 1), sequence(3, 20)
    ranks.step((one, 0, 3), (other, 0, 2))
    assert len(ranks.store) == 2
    ranks.book.forget(1)
    ranks.step((plain, 0, 1))
    assert len(ranks.store) == 1, "the next step lets it go, whatever it computes"
    assert ranks.book.step([(plain, 1, 1)]) is None
    if again:
        ranks.step((one, 0, 4), (other, 2, 4))
        ranks.step((one, 4, 3))
        assert ranks.tower.calls == [[(4, 6), (8, 2)], [(4, 6)]]
    else:
        ranks.book.forget(2)
        ranks.step((plain, 1, 1))
    assert not len(ranks.store) and not ranks.book.num_held


@pytest.mark.parametrize("place", ["tower", "forward"])
def test_a_failed_step(place):
    """Nobody relies on what it should have computed; what others hold stays."""
    ranks = Ranks()
    one, other = sequence(1, 1, A), sequence(2, 1, B, 1)
    ranks.step((other, 0, 2))
    orders = ranks.book.step([(one, 0, 3)]).orders
    if place == "forward":
        ranks.store.begin(orders, ranks.tower)
    ranks.book.step_failed()
    ranks.book.forget(1)
    late = sequence(3, 1, A)
    ranks.step((late, 0, 7), (other, 2, 4))
    assert ranks.tower.calls[-1] == [(4, 6)] and not len(ranks.store)


def test_fifty_pictures_in_one_step():
    ranks = Ranks()
    pictures = [picture(2, 4, seed=n) for n in range(50)]
    ranks.step((sequence(1, 1, *pictures, 1), 0, 102))
    assert ranks.tower.calls == [[(2, 4)] * 50] and not len(ranks.store)


def test_what_is_held_is_no_slice_of_more():
    ranks = Ranks()
    ranks.step((sequence(1, *(picture(8, 8, seed=n) for n in range(9))), 0, 9 * 16 - 1))
    (held, ) = ranks.store._embeddings.values()
    assert held.untyped_storage().nbytes() == ranks.store.nbytes == 16 * HIDDEN * 4


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules(seed):
    """Sequences that come, go on, are preempted and leave at random. Every token is checked, and what is held is at
    most one picture per sequence in the middle of its prompt."""
    chance, ranks = random.Random(seed), Ranks()
    few = [picture(2 * chance.randrange(1, 5), 2 * chance.randrange(1, 5), seed=n) for n in range(5)]
    running, waiting = {}, []
    for number in range(30):
        parts = chance.choices([1, 2, 5, *few], k=chance.randrange(1, 9))
        waiting.append(sequence(number, *parts))
    length = 130        # Longer than any prompt.
    while waiting or running:
        if waiting and len(running) < 4:
            seq = waiting.pop()
            running[seq.seq_id] = [seq, 0]
        for seq_id in list(running):
            if chance.random() < 0.1:
                ranks.book.forget(seq_id)
                seq, _ = running.pop(seq_id)
                if chance.random() < 0.5:
                    waiting.append(seq)
        rows = [(seq, done, chance.randrange(1, 12)) for seq, done in running.values() if chance.random() < 0.8]
        ranks.step(*rows)
        for seq, _, count in rows:
            running[seq.seq_id][1] += count
            if running[seq.seq_id][1] >= length:
                del running[seq.seq_id]
                ranks.book.forget(seq.seq_id)
        assert len(ranks.store) <= max(4, len(running)) and ranks.book.num_held <= len(running)
    ranks.step((sequence(99, 1), 0, 1))
    assert not len(ranks.store) and not ranks.book.num_held


def test_disagreement_is_an_error():
    store, tower = PictureStore(), Tower()
    orders = PictureBook().step([(sequence(1, 1, A), 0, 7)]).orders
    with pytest.raises(RuntimeError, match=r"to be placed, but was not computed"):
        store.begin(PictureOrders([], orders.place, frozenset()), tower)
    with pytest.raises(RuntimeError, match="has no vision tower"):
        store.begin(orders, torch.nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="has no embeddings 3 to 8"):
        store.begin(orders._replace(place=[orders.place[0]._replace(first=3)]), tower)
    tower.missing = 1
    with pytest.raises(RuntimeError, match="of 4 x 6 patches gave 5 embeddings for 6 placeholders"):
        store.begin(orders, tower)


def test_the_step_is_set_for_the_forward_pass_only():
    step = PictureStep(((1, torch.ones(2, HIDDEN)), ))
    with set_picture_step(step):
        assert get_picture_step() is step
    assert get_picture_step() is None
    rows = torch.zeros(4, HIDDEN)
    step.place(rows)
    assert rows.sum(1).tolist() == [0, HIDDEN, HIDDEN, 0]
