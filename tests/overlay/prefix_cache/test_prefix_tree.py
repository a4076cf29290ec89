"""The tree of prefixes against a set of prefixes."""
import random
import time

import pytest

from vllm.overlay.prefix_cache.prefix_tree import PrefixTree, walk


class Kept:
    node = None

    def __init__(self, prefix):
        self.prefix = prefix


class Model:
    """The same by sets. A content is the tuple of all blocks up to its own."""

    def __init__(self):
        self.tree, self.kept = PrefixTree(), {}

    def needed(self):
        return {prefix[:end] for prefix in self.kept for end in range(1, len(prefix) + 1)}

    def check(self):
        needed = self.needed()
        assert set(self.tree._owners) == needed
        for node in walk(self.tree.root):
            assert node.checkpoint is not None or len(node.children) > 1 or node is self.tree.root
            assert node.end == len(node.edge) + (node.parent.end if node.parent else 0)
            for content in node.edge:
                assert self.tree._owners[content] is node
            for first, child in node.children.items():
                assert child.parent is node and child.edge[0] == first
        for prefix, kept in self.kept.items():
            assert kept.node.checkpoint is kept and kept.node.edge[-1] == prefix


def chain_of(blocks):
    return [tuple(blocks[:end]) for end in range(1, len(blocks) + 1)]


@pytest.mark.parametrize("seed", range(60))
def test_against_a_set_of_prefixes(seed):
    chance = random.Random(seed)
    model = Model()
    for _ in range(120):
        blocks = chance.choices("ab", k=chance.randrange(1, 4)) * chance.randrange(1, 4) + chance.choices(
            "abc", k=chance.randrange(0, 4))
        chain, what = chain_of(blocks), chance.random()
        end = chance.randrange(1, len(chain) + 1)
        before = model.needed()
        if what < 0.6 and chain[end - 1] not in model.kept:
            kept = Kept(chain[end - 1])
            new = model.tree.insert(chain, end, kept)
            model.kept[chain[end - 1]] = kept
            assert set(new) == model.needed() - before and len(new) == len(set(new))
        elif what < 0.85 and model.kept:
            kept = model.kept.pop(chance.choice(sorted(model.kept)))
            gone = model.tree.remove(kept.node)
            assert set(gone) == before - model.needed() and len(gone) == len(set(gone))
        elif before:
            content = chance.choice(sorted(before))
            taken, gone = model.tree.cut(content)
            expected = {prefix for prefix in model.kept if prefix[:len(content)] == content}
            assert {kept.prefix for kept in taken} == expected and len(taken) == len(expected)
            for prefix in expected:
                del model.kept[prefix]
            assert set(gone) == before - model.needed()
        model.check()
        for length in range(len(chain) + 1):
            nearest = max((prefix for prefix in model.kept if tuple(chain[length - 1] if length else ())[:len(prefix)]
                           == prefix), key=len, default=None)
            found = model.tree.nearest(chain, length)
            assert (found.prefix if found else None) == nearest
            assert model.tree.known(chain, length) == sum(one in model.needed() for one in chain[:length])
            if length:
                assert model.tree.at(chain, length) is model.kept.get(chain[length - 1])


def test_cutting_what_is_not_there_changes_nothing():
    tree = PrefixTree()
    tree.insert(chain_of("abc"), 2, Kept("ab"))
    assert tree.cut(tuple("abc")) == ([], []) and len(tree) == 2


@pytest.mark.parametrize("order", ["first", "last", "random"])
def test_a_chain_of_16k_blocks_goes_piece_by_piece(order):
    """4,000 checkpoints: no operation may take time of all of them."""
    chain = list(range(16_000))
    tree, kept = PrefixTree(), []
    start = time.process_time()
    for end in range(4, 16_001, 4):
        kept.append(Kept(end))
        tree.insert(chain, end, kept[-1])
    if order != "first":
        kept.reverse()
    if order == "random":
        random.Random(0).shuffle(kept)
    for one in kept:
        tree.remove(one.node)
    seconds = time.process_time() - start
    assert not len(tree) and seconds < 2, f"{seconds:.2f} s"
