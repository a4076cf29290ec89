"""The prefixes that have a checkpoint, as a tree: which KV blocks the checkpoints need, and which checkpoint a prompt
may start from.

A node is a place in a prefix. Its edge is the blocks between its parent and itself, by content hash (`content_hash`).
Nodes without a checkpoint are only where prefixes part. A content hash is in exactly one edge, because it stands for
the whole prefix up to its block; so a block is needed by a checkpoint if and only if it is in the tree.
"""
from collections.abc import Iterator, Sequence
from typing import Any


class Node:
    """end: number of blocks before this place. edge: content hashes of the blocks [parent.end, end). children: by the
    first hash of their edge. checkpoint: what is kept here, None at the root and where prefixes only part."""
    __slots__ = ("checkpoint", "children", "edge", "end", "parent")

    def __init__(self, end: int, edge: list[int], parent: "Node | None") -> None:
        self.end = end
        self.edge = edge
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.checkpoint: Any = None


class PrefixTree:
    """`content in tree`: whether a checkpoint needs that block. Whatever is kept at a node has an attribute `node`,
    which the tree sets."""

    def __init__(self) -> None:
        self.root = Node(0, [], None)
        self._owners: dict[int, Node] = {}

    def __contains__(self, content: object) -> bool:
        return content in self._owners

    def __len__(self) -> int:
        return len(self._owners)

    def known(self, chain: Sequence[int], num_blocks: int) -> int:
        """Returns how many of the first `num_blocks` hashes of a chain are in the tree: whoever has one has all before
        it."""
        low, high = 0, num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in self._owners:
                low = middle
            else:
                high = middle - 1
        return low

    def nearest(self, chain: Sequence[int], num_blocks: int) -> Any:
        """Returns the last checkpoint within the first `num_blocks` blocks of a chain, or None."""
        known = self.known(chain, num_blocks)
        if not known:
            return None
        node: Node | None = self._owners[chain[known - 1]]
        if node is not None and node.end > known:
            node = node.parent
        while node is not None and node.checkpoint is None:
            node = node.parent
        return node.checkpoint if node is not None else None

    def at(self, chain: Sequence[int], num_blocks: int) -> Any:
        """Returns the checkpoint exactly behind the first `num_blocks` blocks of a chain, or None."""
        node = self._owners.get(chain[num_blocks - 1])
        return node.checkpoint if node is not None and node.end == num_blocks else None

    def insert(self, chain: Sequence[int], num_blocks: int, checkpoint: Any) -> list[int]:
        """Keeps a checkpoint behind the first `num_blocks` blocks of a chain. Returns the hashes of the blocks that are
        needed from now on."""
        known = self.known(chain, num_blocks)
        node = self._owners[chain[known - 1]] if known else self.root
        if node.end > known:
            node = self._split(node, known)
        new = list(chain[known:num_blocks])
        if new:
            parent, node = node, Node(num_blocks, new, node)
            parent.children[new[0]] = node
            self._owners.update(dict.fromkeys(new, node))
        node.checkpoint = checkpoint
        checkpoint.node = node
        return new

    def remove(self, node: Node) -> list[int]:
        """Takes the checkpoint of a node away. Returns the hashes of the blocks that none needs any more."""
        node.checkpoint = None
        return self._tidy(node)

    def cut(self, content: int) -> tuple[list[Any], list[int]]:
        """Takes away all checkpoints that need a block. Returns them and the hashes of the blocks that none needs any
        more; all as if nothing had happened if no checkpoint needs it."""
        top = self._owners.get(content)
        return ([], []) if top is None else self.cut_below(top)

    def cut_below(self, top: Node) -> tuple[list[Any], list[int]]:
        """Takes away the checkpoints of a node other than the root, and of all below it. Returns as `cut`."""
        assert top.parent is not None
        del top.parent.children[top.edge[0]]
        checkpoints, unneeded = [], []
        for node in walk(top):
            if node.checkpoint is not None:
                checkpoints.append(node.checkpoint)
                node.checkpoint = None
            unneeded.extend(node.edge)
        for gone in unneeded:
            del self._owners[gone]
        return checkpoints, unneeded + self._tidy(top.parent)

    def _split(self, node: Node, end: int) -> Node:
        """Makes a node inside the edge of another and returns it."""
        assert node.parent is not None
        length = end - node.parent.end
        upper = Node(end, node.edge[:length], node.parent)
        node.parent.children[upper.edge[0]] = upper
        node.edge = node.edge[length:]
        node.parent = upper
        upper.children[node.edge[0]] = node
        self._owners.update(dict.fromkeys(upper.edge, upper))
        return upper

    def _tidy(self, node: Node) -> list[int]:
        """Removes what keeps nothing and parts nothing, from a node upwards; returns the hashes that go with it."""
        gone: list[int] = []
        while node.parent is not None and node.checkpoint is None and not node.children:
            parent = node.parent
            del parent.children[node.edge[0]]
            for content in node.edge:
                del self._owners[content]
            gone += node.edge
            node = parent
        if node.parent is not None and node.checkpoint is None and len(node.children) == 1:
            self._join(node)
        return gone

    def _join(self, upper: Node) -> None:
        """Makes one of a node that keeps nothing and its only child. The shorter edge gets a new owner, so that a long
        chain that goes piece by piece does not take quadratic time."""
        (lower, ) = upper.children.values()
        assert upper.parent is not None
        if len(upper.edge) < len(lower.edge):
            self._owners.update(dict.fromkeys(upper.edge, lower))
            lower.edge = upper.edge + lower.edge
            lower.parent = upper.parent
            upper.parent.children[lower.edge[0]] = lower
            return
        self._owners.update(dict.fromkeys(lower.edge, upper))
        upper.edge += lower.edge
        upper.end, upper.children, upper.checkpoint = lower.end, lower.children, lower.checkpoint
        for child in upper.children.values():
            child.parent = upper
        if upper.checkpoint is not None:
            upper.checkpoint.node = upper


def walk(top: Node) -> Iterator[Node]:
    """Yields a node and all below it."""
    left = [top]
    while left:
        node = left.pop()
        yield node
        left.extend(node.children.values())
