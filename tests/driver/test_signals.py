"""Signals as the step loop sees them; the real ones are in test_service.py."""

import os
import signal

import pytest

from driver.signals import Interrupted, StopSignal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def stop():
    """Installed handlers, put back afterwards."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop = StopSignal()
    stop.install()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_the_loop_hears_a_signal_at_its_next_look(stop, signum, code):
    stop.check()
    os.kill(os.getpid(), signum)
    with pytest.raises(Interrupted, match=signum.name) as ended:
        stop.check()
    assert ended.value.exit_code == code


def test_an_acknowledged_signal_lets_the_orderly_end_wait(stop):
    os.kill(os.getpid(), signal.SIGTERM)
    stop.acknowledge()
    stop.check()
