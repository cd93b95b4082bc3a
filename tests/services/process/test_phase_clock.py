import itertools
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.process.phase_clock import PhaseClock
from services.process.phases import PHASES
from services.process.span_log import MOST_SPANS, Mark, Span, seconds_of, thinned


class FakeTime:
    """Seconds that pass when told; multiples of 1/8 add up without rounding."""

    def __init__(self):
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def nonzero(timing: dict[str, float]) -> dict[str, float]:
    return {phase: seconds for phase, seconds in timing.items() if seconds}


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
    timing = clock.take_timing().seconds
    assert nonzero(timing) == {"decode": 10.0, "compile": 4.0, "unexplained": 17.0}
    assert tuple(timing) == PHASES


def test_a_timing_inside_a_phase_splits_it():
    now = FakeTime()
    clock = PhaseClock(now)
    with clock.phase("idle"):
        now.s += 3.0
        assert nonzero(clock.take_timing().seconds) == {"idle": 3.0}
        now.s += 5.0
    assert nonzero(clock.take_timing().seconds) == {"idle": 5.0}
    assert nonzero(clock.take_timing().seconds) == {}


def test_phase_that_raises_is_closed():
    now = FakeTime()
    clock = PhaseClock(now)
    with pytest.raises(KeyError), clock.phase("reward"):
        now.s += 1.0
        raise KeyError
    now.s += 2.0
    assert nonzero(clock.take_timing().seconds) == {"reward": 1.0, "unexplained": 2.0}


programs = st.recursive(
    st.integers(0, 40).map(lambda eighths: ("sleep", eighths / 8)),
    lambda inner: st.tuples(
        st.sampled_from([phase for phase in PHASES if phase != "unexplained"]),
        st.lists(inner, max_size=4),
    ),
    max_leaves=20,
)


def play(clock, now, node):
    name, body = node
    if name == "sleep":
        now.s += body
        return
    with clock.phase(name):
        for child in body:
            play(clock, now, child)


@given(programs)
def test_phases_add_up_to_wall_time_and_spans_to_phases(program):
    now = FakeTime()
    clock = PhaseClock(now)
    play(clock, now, program)
    timing = clock.take_timing()
    assert sum(timing.seconds.values()) == now.s - 100.0 == timing.end_s - timing.start_s
    assert seconds_of(timing.spans) == nonzero(timing.seconds)
    ends = [100.0, *(span.end_s for span in timing.spans)]
    assert [span.start_s for span in timing.spans] == ends[:-1] and ends[-1] == now.s
    assert all(one.phase != next_.phase for one, next_ in itertools.pairwise(timing.spans))


@given(st.lists(programs, max_size=3), st.lists(st.integers(0, 400), min_size=1, max_size=4))
def test_timings_that_end_at_earlier_moments_tile_the_time(parts, moments):
    """Whatever moments are asked for, no second is lost or counted twice."""
    now = FakeTime()
    clock = PhaseClock(now)
    timings = []
    for part, moment in itertools.zip_longest(parts, moments):
        if part is not None:
            play(clock, now, part)
        if moment is not None:
            timings.append(clock.take_timing(100.0 + moment / 8))
            assert timings[-1].end_s == min(now.s, max(timings[-1].start_s, 100.0 + moment / 8))
    timings.append(clock.take_timing())
    assert [timing.start_s for timing in timings] == [
        100.0,
        *(timing.end_s for timing in timings[:-1]),
    ]
    for timing in timings:
        assert sum(timing.seconds.values()) == timing.end_s - timing.start_s
        assert seconds_of(timing.spans) == nonzero(timing.seconds)
    assert sum(nonzero(clock.total()).values()) == now.s - 100.0


def test_a_timing_may_end_before_it_is_taken():
    now = FakeTime()
    clock = PhaseClock(now)
    with clock.phase("decode"):
        now.s += 4.0
        clock.mark("version 3")
    with clock.phase("idle"):
        now.s += 2.0
        clock.mark("version 4")
        timing = clock.take_timing(until_s=105.0)
        assert nonzero(timing.seconds) == {"decode": 4.0, "idle": 1.0}
        assert timing.spans == (Span("decode", 100.0, 104.0), Span("idle", 104.0, 105.0))
        assert timing.marks == (Mark(104.0, "version 3"),)
        assert (timing.end_s, timing.taken_s) == (105.0, 106.0)
        now.s += 8.0
    rest = clock.take_timing()
    assert nonzero(rest.seconds) == {"idle": 9.0} and rest.marks == (Mark(106.0, "version 4"),)


def test_a_clock_that_is_never_read_keeps_few_spans_and_all_seconds():
    now = FakeTime()
    clock = PhaseClock(now)
    for _ in range(10_000):
        with clock.phase("decode"):
            now.s += 0.25
        with clock.phase("reward"):
            now.s += 0.125
        clock.mark("version 1")
    kept = len(clock._log._ends)
    assert kept <= 4096
    timing = clock.take_timing(until_s=100.0)
    assert timing.end_s > 3_000.0, "thinned seconds are not cut: it ends as early as it can"
    rest = clock.take_timing()
    whole = timing.followed_by(rest)
    assert nonzero(whole.seconds) == {"decode": 2_500.0, "reward": 1_250.0}
    assert len(timing.spans) <= MOST_SPANS and len(whole.spans) <= MOST_SPANS
    assert len(whole.marks) <= 100
    assert seconds_of(whole.spans)["reward"] == pytest.approx(1_250.0, rel=0.05)


touching = st.lists(
    st.tuples(st.sampled_from(["decode", "reward", "idle"]), st.floats(1e-6, 100.0)), max_size=300
).map(
    lambda parts: [
        Span(phase, end - length, end)
        for (phase, length), end in zip(
            parts, itertools.accumulate(length for _, length in parts), strict=True
        )
    ]
)


@given(touching, st.integers(1, 50))
def test_thinned_spans_cover_the_same_time_and_each_phase_keeps_about_its_seconds(spans, most):
    found = thinned(spans, most=most)
    assert len(found) <= most
    if not spans:
        assert found == []
        return
    assert (found[0].start_s, found[-1].end_s) == (spans[0].start_s, spans[-1].end_s)
    assert all(
        one.end_s == pytest.approx(next_.start_s, abs=1e-9) and one.phase != next_.phase
        for one, next_ in itertools.pairwise(found)
    )
    assert {span.phase for span in found} <= {span.phase for span in spans}
    longest = max(span.end_s - span.start_s for span in found)
    before, after = seconds_of(spans), seconds_of(found)
    for phase, seconds in before.items():
        assert abs(after.get(phase, 0.0) - seconds) <= 2 * longest + 1e-6


def test_long_spans_stay_and_a_minority_of_short_ones_shows():
    """A second of decoding, then 1000 turns of 6 ms decode and 4 ms reward, then a second idle."""
    spans, now = [Span("decode", 0.0, 1.0)], 1.0
    for _ in range(1000):
        spans += [Span("reward", now, now + 0.004), Span("decode", now + 0.004, now + 0.01)]
        now += 0.01
    spans.append(Span("idle", now, now + 1.0))
    found = thinned(spans, most=200)
    assert found[-1] == spans[-1] and found[0].phase == "decode"
    seconds = seconds_of(found)
    assert seconds["reward"] == pytest.approx(4.0, rel=0.05)
    assert seconds["decode"] == pytest.approx(7.0, rel=0.05)
    assert thinned(found, most=200) == found, "what is thin stays as it is"


def test_a_mark_waits_while_a_timing_is_taken():
    clock = PhaseClock()
    thread = threading.Thread(target=clock.mark, args=["version 1"])
    with clock._lock:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and not clock._marks
    thread.join()
    assert [mark.text for mark in clock.take_timing().marks] == ["version 1"]


@pytest.mark.parametrize("name", ["decoding", "unexplained", ""])
def test_unknown_phase_is_an_error(name):
    clock = PhaseClock()
    with pytest.raises(ValueError, match="must be one of"), clock.phase(name):
        pass


def test_another_thread_cannot_enter_a_phase_of_an_open_clock_but_may_end_its_timing():
    now = FakeTime()
    clock = PhaseClock(now)
    errors, timings = [], []

    def intrude():
        try:
            clock.phase("wire").__enter__()
        except RuntimeError as error:
            errors.append(str(error))
        timings.append(clock.take_timing().seconds)

    with clock.phase("decode"):
        now.s += 2.0
        thread = threading.Thread(target=intrude, name="intruder")
        thread.start()
        thread.join()
        now.s += 3.0
    assert len(errors) == 1 and "intruder" in errors[0] and "'decode'" in errors[0]
    assert nonzero(timings[0]) == {"decode": 2.0} and nonzero(clock.take_timing().seconds) == {
        "decode": 3.0
    }
    assert nonzero(clock.total()) == {"decode": 5.0}, "whatever timings ended"


def test_another_thread_may_use_a_closed_clock():
    now = FakeTime()
    clock = PhaseClock(now)

    def use():
        with clock.phase("wire"):
            now.s += 1.0

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert nonzero(clock.take_timing().seconds) == {"wire": 1.0}


def test_real_time_is_measured():
    clock = PhaseClock()
    with clock.phase("idle"):
        time.sleep(0.02)
    assert clock.take_timing().seconds["idle"] >= 0.02
