"""One small vocabulary and one compiler for all tests of grammars."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.fake_engine import EOS, tokenizer
from vllm.overlay.grammar.compiler import Compiler
from vllm.overlay.grammar.vocabulary import make_vocabulary


@pytest.fixture(scope="session")
def vocabulary():
    """512 tokens, the last 33 of them control tokens."""
    return make_vocabulary(tokenizer(), len(tokenizer()), [EOS])


@pytest.fixture(scope="session")
def compiler(vocabulary):
    made = Compiler(lambda: vocabulary)
    yield made
    made.close()


@pytest.fixture(scope="session")
def matcher(compiler) -> Callable:
    """Makes a matcher of a grammar."""
    return lambda grammar: compiler.compiled(grammar).result(30).copy()
