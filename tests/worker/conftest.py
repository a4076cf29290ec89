"""Tiny checkpoints for the suite."""
import pytest

from tests.helpers import tiny_models, toy_recurrent


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory):
    return tiny_models.make_qwen2(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    toy_recurrent.register()
    return toy_recurrent.make(tmp_path_factory.mktemp("toy"))
