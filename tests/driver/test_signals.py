"""Signals as the step loop sees them; the real ones are in test_service.py."""

import os
import signal
import subprocess
import sys

import pytest

from driver.signals import Interrupted, StopSignal
from tests.deadlines import HANG_S

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
def test_the_loop_notices_a_signal_at_its_next_check(stop, signum, code):
    stop.check()
    os.kill(os.getpid(), signum)
    with pytest.raises(Interrupted, match=signum.name) as ended:
        stop.check()
    assert ended.value.exit_code == code


def test_an_acknowledged_signal_lets_the_orderly_end_wait(stop):
    os.kill(os.getpid(), signal.SIGTERM)
    stop.acknowledge()
    stop.check()


def test_a_further_signal_ends_the_process_at_once_and_leaves_a_word(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from driver.signals import StopSignal\n"
        "stop = StopSignal()\n"
        "stop.install()\n"
        "stop.before_abort = lambda code: print('aborted', code, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('not reached')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert (ended.returncode, ended.stdout) == (143, "aborted 143\n")
