"""How a worker notices that the learner does not answer it."""

import concurrent.futures
import socket
import threading

import pytest

from services.wire import server as server_module
from services.wire.health import AGAIN_S, ASK_S, LearnerProbe, check_reachable, check_serving
from services.wire.server import Server
from tests.deadlines import HANG_S


class Learner:
    """Answers a question as a test says; the probe's own thread only asks once, then waits."""

    def __init__(self):
        self.answer: Exception | None = None
        self.asked: list[str] = []
        self.held = threading.Event()
        self.probe = LearnerProbe(self.ask, "a:1")
        while not self.asked:
            self.held.wait(0.001)
        self.probe.close()

    def ask(self, address: str, timeout_s: float) -> None:
        self.asked.append(address)
        if self.answer is not None:
            raise self.answer


@pytest.fixture
def learner():
    return Learner()


def test_silence_adds_up_until_the_learner_answers(learner):
    assert learner.probe.silent_s == 0.0
    learner.answer = TimeoutError("no answer")
    for _ in range(3):
        learner.probe.ask_once()
    assert 3 * AGAIN_S <= learner.probe.silent_s <= 3 * (AGAIN_S + ASK_S)
    learner.answer = None
    learner.probe.ask_once()
    assert learner.probe.silent_s == 0.0


def test_a_server_with_no_thread_left_is_reached_and_one_that_does_not_answer_is_not(
    authority, credentials, monkeypatch
):
    """As a learner that sends weights to many workers."""
    pool, busy = concurrent.futures.ThreadPoolExecutor(1), threading.Event()
    pool.submit(busy.wait, HANG_S)
    monkeypatch.setattr(
        server_module.concurrent.futures, "ThreadPoolExecutor", lambda *_, **__: pool
    )
    with Server(authority.issue("learner"), []) as server:
        address = f"127.0.0.1:{server.port}"
        check_reachable(address, credentials, timeout_s=HANG_S)
        with pytest.raises(TimeoutError, match="the health of the server"):
            check_serving(address, credentials, timeout_s=0.2)
        busy.set()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=f"{address} took no connection within 0.2 s"):
            check_reachable(address, credentials, timeout_s=0.2)


def test_the_address_of_the_next_learner_begins_anew(learner):
    learner.answer = TimeoutError("no answer")
    learner.probe.ask_once()
    learner.probe.connect("b:2")
    assert learner.probe.silent_s == 0.0
    learner.probe.ask_once()
    assert learner.asked[-1] == "b:2" and learner.probe.silent_s > 0
