"""Where checkpoints are taken, and what they are worth."""
import random

import pytest

from vllm.overlay.prefix_cache.policy import Policy

POLICY = Policy()


def places(*arguments, key=None, **fields):
    return [point.position for point in POLICY.points(*arguments, **fields) if key in (None, point.key)]


def test_the_end_and_a_grid():
    assert places(300, 0, 100) == [64, 128, 192, 256, 288]
    assert places(300, 0, 100, key=True) == [288]
    assert places(300, 128, 100) == [192, 256, 288], "none where it was restored"


@pytest.mark.parametrize("length, expected", [(1, []), (64, []), (65, [64]), (80, [64]), (81, [64, 80]),
                                              (96, [64, 80]), (97, [64, 96])])
def test_short_prompts(length, expected):
    assert places(length, 0, 100) == expected


def test_boundaries_and_partings_are_keys():
    points = POLICY.points(1000, 0, 100, (30, 333, 340, 990), (500, 512))
    assert [point.position for point in points if point.key] == [320, 336, 496, 512, 976, 992]
    assert [point.saved for point in points if point.key] == [320, 16, 160, 16, 464, 16], "keys count from keys"
    assert {point.saved for point in points if not point.key} == {48, 64}, "grid points from whatever is before them"


def test_the_grid_widens_until_it_takes_half_the_slots():
    for slots in (0, 1, 2, 3, 7, 20, 100, 300):
        for length in (70, 500, 5000, 60_000, 262_144):
            for hit in (0, 64, length // 2 // 16 * 16):
                points = POLICY.points(length, hit, slots)
                grid = [point.position for point in points if not point.key]
                assert len(grid) <= slots // 2, (length, slots, grid)
                steps = {two - one for one, two in zip(grid, grid[1:], strict=False)}
                assert len(steps) < 2 and all(step >= 64 and step & (step - 1) == 0 for step in steps)
                assert [point.position for point in points] == sorted({point.position for point in points})
                assert all(hit < point.position <= length - 1 and point.position >= 64 for point in points)
                assert all(point.position % 16 == 0 for point in points)
                if slots and points:
                    assert points[-1].key and points[-1].position == (length - 1) // 16 * 16
    assert len(places(5000, 0, 300, key=False)) == 77 and len(places(5000, 0, 100, key=False)) == 38


def test_with_few_slots_the_first_and_last_boundaries_come_first():
    boundaries = range(100, 10_000, 100)
    keys = places(10_000, 0, 40, boundaries=boundaries, partings=(5000, ), key=True)
    assert len(keys) == 20
    assert {96, 4992, 9984} <= set(keys)
    last = [end // 16 * 16 for end in boundaries][-8:]
    assert set(last) <= set(keys)
    spread = [place for place in keys if 96 < place < last[0] and place != 4992]
    gaps = [two - one for one, two in zip(spread, spread[1:], strict=False)]
    assert len(spread) >= 8 and max(gaps) < 2 * min(gaps), spread
    assert places(10_000, 0, 1, boundaries=boundaries, key=True) == [9984]
    assert places(10_000, 0, 3, boundaries=boundaries, partings=(700, ), key=True) == [688, 9984]


def test_every_prefix_is_lost_by_64_tokens_at_most_while_there_is_room():
    chance = random.Random(0)
    for _ in range(200):
        length, hit = chance.randrange(66, 6000), 0
        found = places(length, hit, 300, boundaries=sorted(chance.sample(range(1, length), 3)))
        for prefix in range(64, length - 1, 16):
            assert any(prefix - 64 < place <= prefix for place in found), (length, prefix, found)


def test_what_is_worth_more():
    def worth(saved, key=True, hits=0, last_use=100, slots=40):
        return POLICY.priority(saved, key, hits, last_use, slots)

    assert worth(1000) > worth(500) > worth(500, key=False)
    assert worth(64, key=False) < worth(16), "grid points go before any key"
    assert worth(500) == worth(500, hits=1) < worth(500, hits=2) < worth(500, hits=3)
    assert worth(500, last_use=90) < worth(500)
    assert worth(1000, last_use=95) == pytest.approx(worth(500, last_use=100)), "half, after 40 / 8 requests"
    assert worth(1000, last_use=99, slots=1) == pytest.approx(worth(500, slots=1)), "never faster than one request"
    assert POLICY.worth_moving(257) and not POLICY.worth_moving(256)
