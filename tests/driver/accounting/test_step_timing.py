"""Offsets between clocks, and the table of timings that no step counts yet."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.accounting.step_timing import ClockOffset, TimingTable
from services.process.phase_clock import PhaseClock


@given(
    st.floats(-1e5, 1e5),
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)), min_size=1, max_size=20),
)
def test_an_offset_stays_within_what_every_answer_proves(true_s, ways_s):
    """Answers of a process whose clock runs as the driver's: what is learned holds for all."""
    offset, now = ClockOffset(), 1e5
    for to_s, back_s in ways_s:
        now += 1.0
        offset.add_bounds(now, now + to_s - true_s, now + to_s + back_s)
        now += to_s + back_s
    tightest_s = min(to_s + back_s for to_s, back_s in ways_s)
    assert abs(offset.seconds - true_s) <= tightest_s + 1e-4 * (now - 1e5) + 1e-6


def test_the_offset_of_one_host_is_zero_from_the_start():
    offset = ClockOffset()
    for asked_s, late_s in itertools.product((10.0, 20.0), (0.0, 3.0)):
        offset.add_bounds(asked_s, asked_s + late_s, asked_s + late_s + 0.01)
        assert offset.seconds == 0.0


def test_a_host_that_slept_is_believed_again():
    offset = ClockOffset()
    offset.add_bounds(100.0, 50.0, 100.01)
    assert offset.seconds == pytest.approx(50.01)
    offset.add_bounds(200.0, 120.0, 200.01)  # its clock went on for 70 s, ours for 100
    assert 80.0 <= offset.seconds <= 80.01


def test_a_table_forgets_timings_of_an_earlier_process_of_that_name():
    table = TimingTable()
    clock = PhaseClock()
    table.add_process("rollout-0", clock.take_timing().taken_s, clock.take_timing().taken_s)
    table.add_timing("rollout-0", clock.take_timing(), clock.take_timing().taken_s)
    table.add_process("rollout-0", clock.take_timing().taken_s, clock.take_timing().taken_s)
    timings = table.close_step(0.0, ["rollout-0"])
    assert timings.silent == timings.gaps == {"rollout-0"}
