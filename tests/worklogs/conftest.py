from pathlib import Path

import pytest

from tests.helpers.tokenizer import tokenizer_folder


@pytest.fixture(scope="session")
def full_folder() -> Path:
    """The whole Qwen3.6 tokenizer as Hugging Face files."""
    return tokenizer_folder()


@pytest.fixture(scope="session")
def small_folder() -> Path:
    """Its 8,192-id variant."""
    return tokenizer_folder(small=8159)
