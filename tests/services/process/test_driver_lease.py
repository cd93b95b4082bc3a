"""A process that its driver has left ends, and a driver or a process that pauses harms nothing."""

import subprocess
import sys

from learner.durable.spool import CLAIM_S, Spool
from services.process.driver_lease import GRACE_S, LEASE_S, DriverLease
from tests.deadlines import HANG_S

CUT_OFF = """
import sys, time
from learner.durable.spool import Spool
from services.process.driver_lease import DriverLease
spool = Spool(sys.argv[1], "r")
spool.claim(0.0)
lease = DriverLease("the learner", 0.5)
lease.start()
print("claimed", flush=True)
time.sleep(3600)
"""


class Leased:
    """A process in made-up time."""

    def __init__(self):
        self.now_s, self.ended = 0.0, []
        self.lease = DriverLease("rollout-0", end=self.ended.append, now=lambda: self.now_s)

    def live(self, seconds: float, *, asked: bool = False) -> bool:
        for _ in range(int(seconds)):
            self.now_s += 1.0
            if asked:
                self.lease.renew()
            self.lease.check()
        return not self.ended

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_process_ends_once_nothing_has_asked_it_for_the_lease_F3():
    one = Leased()
    assert one.live(1000, asked=True) and one.live(LEASE_S)
    assert not one.live(1)
    assert one.ended[0].startswith("rollout-0: the driver has asked nothing for 120 s")


def test_a_driver_that_is_paused_for_90_s_leaves_a_healthy_process_as_it_is():
    one = Leased()
    for _ in range(5):
        assert one.live(90) and one.live(10, asked=True)


def test_a_process_that_was_paused_itself_gets_a_moment_to_be_asked_R04():
    one = Leased()
    one.live(5, asked=True)
    one.pause(500)
    assert one.live(GRACE_S - 1) and one.live(100, asked=True)
    one.pause(500)
    assert not one.live(GRACE_S + 2), "a paused process that was replaced does not stay"


def test_the_next_learner_gets_the_spool_of_one_that_is_cut_off_F3(tmp_path):
    folder = tmp_path / "spool"
    with subprocess.Popen(
        [sys.executable, "-c", CUT_OFF, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as cut_off:
        assert cut_off.stdout is not None and cut_off.stderr is not None
        assert cut_off.stdout.readline() == "claimed\n"
        spool = Spool(folder, "r")
        spool.claim(HANG_S)
        spool.close()
        assert cut_off.wait(HANG_S) == 1
        assert "the learner: the driver has asked nothing for 0.5 s" in cut_off.stderr.read()


def test_a_successor_waits_for_longer_than_the_lease_F3():
    assert CLAIM_S >= LEASE_S + GRACE_S + 30
