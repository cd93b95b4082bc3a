"""A clock that counts no pause of its own process."""

import os
import signal
import subprocess
import sys
import time

import pytest

from driver.accounting.awake_clock import AwakeClock


class Time:
    """The system's monotonic clock, in made-up time."""

    s = 1_000.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def system(monkeypatch):
    made_up = Time()
    monkeypatch.setattr("driver.accounting.awake_clock.time.monotonic", made_up)
    return made_up


def test_it_goes_with_the_system_while_it_is_looked_at(system):
    clock = AwakeClock(5.0)
    for step_s in (0.5, 4.0, 0.0, 5.0):
        system.s += step_s
        clock.now()
    assert clock.now() == pytest.approx(9.5)


@pytest.mark.parametrize("pause_s", [75.0, 90.0, 86_400.0])
def test_a_pause_counts_as_one_tick_however_long_it_is_R04(system, pause_s):
    clock = AwakeClock(5.0)
    system.s += pause_s
    assert clock.now() == 5.0
    system.s += 1.0
    assert clock.now() == 6.0


def test_it_remembers_long_pauses_for_a_while(system):
    clock = AwakeClock(5.0)
    assert not clock.woke_lately(110.0, 60.0)
    system.s += 130.0
    assert clock.woke_lately(110.0, 60.0) and not clock.woke_lately(131.0, 60.0)
    for _ in range(15):
        system.s += 4.0
        assert clock.woke_lately(110.0, 60.0)
    system.s += 4.0
    assert not clock.woke_lately(110.0, 60.0), "it has had time to look around"


def test_several_pauses_are_each_left_out(system):
    clock = AwakeClock(5.0)
    for _ in range(3):
        system.s += 60.0
        clock.now()
    assert clock.now() == 15.0


WATCH = """
import sys, time
from driver.accounting.awake_clock import AwakeClock
clock, start_s = AwakeClock(0.2), time.monotonic()
print("watches", flush=True)
while True:
    awake_s, passed_s = clock.now(), time.monotonic() - start_s
    if passed_s - awake_s > 1.0:
        print(awake_s, passed_s, flush=True)
        break
    time.sleep(0.01)
"""


def test_a_process_that_was_stopped_knows_it_R04():
    watching = subprocess.Popen([sys.executable, "-c", WATCH], stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    try:
        assert watching.stdout.readline() == "watches\n"
        stopped_s = 1.5
        os.kill(watching.pid, signal.SIGSTOP)
        time.sleep(stopped_s)  # the time that is to be left out
        os.kill(watching.pid, signal.SIGCONT)
        awake_s, passed_s = map(float, watching.stdout.readline().split())
    finally:
        watching.kill()
        watching.communicate()
    assert passed_s - awake_s >= 1.0
