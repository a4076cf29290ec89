"""Every client that asks whether the engine is up is told so, whoever asked and went before; and how the talk ends."""
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
    made.heartbeat_thread = threading.Thread(target=lambda: None)
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


def test_no_heartbeat_is_sent_by_sockets_that_are_closed(engine):
    """An end that comes during a step: the engine counts as failed, which the heartbeat wants to say."""
    sending, seen = threading.Event(), []

    def heartbeat():
        sending.set()
        engine._heartbeat_stop_event.wait(10)
        # On the way to its socket when it is told to stop.
        threading.Event().wait(0.2)
        seen.append(engine.ctx.closed)

    engine.heartbeat_thread = threading.Thread(target=heartbeat)
    engine.heartbeat_thread.start()
    sending.wait(10)
    engine.cleanup()
    engine.heartbeat_thread.join(10)
    assert seen == [False], "the sockets were closed while the heartbeat used them"
