"""The two readers of stock: digests of syntax trees, and unified diffs with no fuzz."""

from __future__ import annotations

import pytest

from patches.engine.diffs import apply_diff, parse_diff
from patches.engine.digests import digest_source
from patches.engine.errors import Refused

SOURCE = '''
import os

class A(dict, metaclass=type):
    """Text."""
    x: int = 1

    @property
    def value(self) -> str:
        return f"a{self.x!r:>{3}}b" "c" f"{os.sep}" if self.x else b"\\x00".hex()

    async def run(self, *args, key=None, **rest):
        async with self as it:
            yield lambda y, /: (y := it)

    class Inner:
        def f(self): pass

def f(): return 1
def f(): return 2
if True:
    def hidden(): pass
'''
# Made by the program that wrote the table of stock symbols. No Python version, no change of ours may give others.
EXPECTED = {
    "whole": "e3b3c121007e7786",
    "A": "class dict",
    "A.value": "0c48e30fe40ca247",
    "A.run": "cff147b554c67fd1",
    "A.Inner": "class ",
    "A.Inner.f": "e40fa17efad0881c",
    "f": "db7385f0be309008",
}


def test_digests_are_those_of_the_table() -> None:
    digests = digest_source(SOURCE.encode())
    assert {"whole": digests.whole, **digests.symbols} == EXPECTED


def test_layout_does_not_count() -> None:
    other = SOURCE.replace("x: int = 1", "x: int = (1)  # one").replace("\n", "\r\n").encode()
    assert digest_source(other) == digest_source(SOURCE.encode())
    assert digest_source(SOURCE.replace("return 2", "return 3").encode()).symbols["f"] != EXPECTED["f"]


DIFF = """\
diff --git a/x.py b/x.py
--- a/x.py
+++ b/x.py
@@ -2,3 +2,4 @@ def somewhere
 b
-c
+C
+CC
 d
@@ -6,2 +7,1 @@
-f
 g
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"a\nb\nc\nd\ne\nf\ng\n", b"a\nb\nC\nCC\nd\ne\ng\n"),
        (b"a\r\nb\r\nc\r\nd\r\ne\r\nf\r\ng\r\n", b"a\r\nb\r\nC\r\nCC\r\nd\r\ne\r\ng\r\n"),
        (b"0\n0\n0\nb\nc\nd\nf\ng", b"0\n0\n0\nb\nC\nCC\nd\ng"),  # moved, and no line end at the end
        (b"b\nc\nd\nf\ng\n\xff\n", b"b\nC\nCC\nd\ng\n\xff\n"),  # bytes that are no UTF-8 stay
        (b"b\r\nc\nd\nf\ng\n", b"b\r\nC\nCC\nd\ng\n"),  # mixed: kept lines stay, new ones follow the majority
    ],
)
def test_diff_is_applied(old: bytes, new: bytes) -> None:
    assert apply_diff(old, parse_diff(DIFF, "x"), "x") == new


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (b"a\nb\nc\nD\nf\ng\n", r"x hunk 1 \(line 2, 'b' and following\) fits nowhere"),
        (b"b\nc \nd\nf\ng\n", "x hunk 1 .* fits nowhere"),
        (b"b\nc\nd\nf\ng\nf\ng\n", "x hunk 2 fits in 2 places"),
        (b"f\ng\nb\nc\nd\n", "x hunk 2 lies before hunk 1"),
        (b"", "x hunk 1 .* fits nowhere"),
    ],
)
def test_diff_that_does_not_fit(old: bytes, message: str) -> None:
    with pytest.raises(Refused, match=message):
        apply_diff(old, parse_diff(DIFF, "x"), "x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no unified diff"),
        ("--- a\n+++ b\n@@ -1 +1 @@\n-a\n", "is cut off"),
        ("--- a\n+++ b\n@@ -1 +1 @@\n-a\n-a\n", "line 5 does not fit"),
        ("--- a\n+++ b\n@@ -1 +1 @@\n*a\n", "line 4 does not fit"),
        ("--- a\n+++ b\n@@ -1 +1 @@\n-a\n+b\n--- c\n+++ d\n@@ -1 +1 @@\n-a\n+b\n", "changes several files"),
    ],
)
def test_broken_diff(text: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        parse_diff(text, "x")


def test_insertion_without_context() -> None:
    with pytest.raises(Refused, match="no context"):
        apply_diff(b"a\n", parse_diff("--- a\n+++ b\n@@ -1,0 +2 @@\n+b\n", "x"), "x")
