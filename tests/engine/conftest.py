"""One tiny checkpoint for the suite."""
import pytest

from tests.helpers import tiny_models


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory):
    return tiny_models.make_qwen2(tmp_path_factory.mktemp("qwen2"))
