"""Every client that asks whether the engine is up is told so, whoever asked and went before."""
import pickle
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import zmq

from vllm.engine.multiprocessing import RPCStartupRequest, RPCStartupResponse
from vllm.engine.multiprocessing.engine import MQLLMEngine


@pytest.fixture
def engine(tmp_path):
    """Its sockets, without a model."""
    made = object.__new__(MQLLMEngine)
    made.ctx, made.data_ipc_path = zmq.Context(), f"ipc://{tmp_path}/data"
    made._heartbeat_stop_event = threading.Event()
    made.engine = SimpleNamespace(is_tracing_enabled=lambda: False, model_executor=Mock())
    return made


def asks(context: zmq.Context, path: str) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.connect(path)
    socket.send(pickle.dumps(RPCStartupRequest.IS_SERVER_READY))
    return socket


def test_who_asks_after_one_who_has_gone(engine):
    with zmq.Context() as context:
        # Asked before there was anybody to answer; gone when the answer comes.
        early = asks(context, engine.data_ipc_path)
        engine.run_startup_loop()
        assert early.poll(10_000), "the one who asked first was not answered"
        early.close(linger=0)
        for _ in range(3):
            with asks(context, engine.data_ipc_path) as socket:
                assert socket.poll(10_000), "nobody answers the next one"
                answer = pickle.loads(socket.recv())
                assert isinstance(answer, RPCStartupResponse) and answer.tracing_enabled is False
    executor = engine.engine.model_executor
    engine.cleanup()
    assert not engine._welcome.is_alive() and engine.ctx.closed
    executor.shutdown.assert_called_once_with()
