"""How a worker notices that the learner does not answer it."""

import threading

import pytest

from services.wire.health import AGAIN_S, ASK_S, LearnerProbe, NotServing


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


def test_a_refusal_is_an_answer(learner):
    learner.answer = NotServing("it starts")
    learner.probe.ask_once()
    assert learner.probe.silent_s == 0.0


def test_the_address_of_the_next_learner_begins_anew(learner):
    learner.answer = TimeoutError("no answer")
    learner.probe.ask_once()
    learner.probe.connect("b:2")
    assert learner.probe.silent_s == 0.0
    learner.probe.ask_once()
    assert learner.asked[-1] == "b:2" and learner.probe.silent_s > 0
