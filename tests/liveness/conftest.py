"""One server for the suite, over a tiny hybrid model. Each test finds it idle and must leave it so."""
import pytest

from tests.helpers.live_server import LiveServer, tiny_hybrid


@pytest.fixture(scope="session")
def live(tmp_path_factory):
    server = LiveServer(tiny_hybrid(tmp_path_factory.mktemp("live") / "model"), tmp_path_factory.mktemp("s"))
    assert server.post().status_code == 200
    yield server
    server.close()


@pytest.fixture(autouse=True)
def nothing_is_left(live):
    live.until_idle()
    yield
    live.pace = 0.0
    live.until_idle()
