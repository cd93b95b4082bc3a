import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.phase_clock import PHASES, PhaseClock


class FakeTime:
    """Seconds that pass when told; multiples of 1/8 add up without rounding."""

    def __init__(self):
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def nonzero(lap: dict[str, float]) -> dict[str, float]:
    return {phase: seconds for phase, seconds in lap.items() if seconds}


def test_nested_phase_pauses_the_outer_one():
    now = FakeTime()
    clock = PhaseClock(now)
    now.s += 1.0
    with clock.phase("decode"):
        now.s += 2.0
        with clock.phase("compile"):
            now.s += 4.0
        now.s += 8.0
    now.s += 16.0
    lap = clock.lap()
    assert nonzero(lap) == {"decode": 10.0, "compile": 4.0, "unexplained": 17.0}
    assert tuple(lap) == PHASES


def test_lap_inside_a_phase_splits_it():
    now = FakeTime()
    clock = PhaseClock(now)
    with clock.phase("idle"):
        now.s += 3.0
        assert nonzero(clock.lap()) == {"idle": 3.0}
        now.s += 5.0
    assert nonzero(clock.lap()) == {"idle": 5.0}
    assert nonzero(clock.lap()) == {}


def test_phase_that_raises_is_closed():
    now = FakeTime()
    clock = PhaseClock(now)
    with pytest.raises(KeyError), clock.phase("reward"):
        now.s += 1.0
        raise KeyError
    now.s += 2.0
    assert nonzero(clock.lap()) == {"reward": 1.0, "unexplained": 2.0}


@given(
    st.recursive(
        st.integers(0, 40).map(lambda eighths: ("sleep", eighths / 8)),
        lambda inner: st.tuples(st.sampled_from(PHASES[:-1]), st.lists(inner, max_size=4)),
        max_leaves=20,
    )
)
def test_phases_add_up_to_wall_time(program):
    now = FakeTime()
    clock = PhaseClock(now)

    def play(node):
        name, body = node
        if name == "sleep":
            now.s += body
            return
        with clock.phase(name):
            for child in body:
                play(child)

    play(program)
    assert sum(clock.lap().values()) == now.s - 100.0


@pytest.mark.parametrize("name", ["decoding", "unexplained", ""])
def test_unknown_phase_is_an_error(name):
    clock = PhaseClock()
    with pytest.raises(ValueError, match="must be one of"), clock.phase(name):
        pass


def test_another_thread_cannot_enter_a_phase_of_an_open_clock_but_may_end_its_lap():
    now = FakeTime()
    clock = PhaseClock(now)
    errors, laps = [], []

    def intrude():
        try:
            clock.phase("wire").__enter__()
        except RuntimeError as error:
            errors.append(str(error))
        laps.append(clock.lap())

    with clock.phase("decode"):
        now.s += 2.0
        thread = threading.Thread(target=intrude, name="intruder")
        thread.start()
        thread.join()
        now.s += 3.0
    assert len(errors) == 1 and "intruder" in errors[0] and "'decode'" in errors[0]
    assert nonzero(laps[0]) == {"decode": 2.0} and nonzero(clock.lap()) == {"decode": 3.0}
    assert nonzero(clock.total()) == {"decode": 5.0}, "whatever laps ended"


def test_another_thread_may_use_a_closed_clock():
    now = FakeTime()
    clock = PhaseClock(now)

    def use():
        with clock.phase("wire"):
            now.s += 1.0

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert nonzero(clock.lap()) == {"wire": 1.0}


def test_real_time_is_measured():
    clock = PhaseClock()
    with clock.phase("idle"):
        time.sleep(0.02)
    assert clock.lap()["idle"] >= 0.02
