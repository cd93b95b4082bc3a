"""Whole hosts that fail, in a run over several of them: `make cluster`."""

import time

import pytest

from tests.cluster.cluster_run import cluster_run
from tests.cluster.hosts import reason_against

pytestmark = [pytest.mark.slow, pytest.mark.service, pytest.mark.cluster]

STEPS, FAULT_STEP = 12, 3


@pytest.fixture(autouse=True)
def allowed():
    if reason := reason_against():
        pytest.skip(reason)


@pytest.fixture
def note(record_property):
    """Prints the seconds that a run took to recover, and keeps them with the test's result."""

    def write(what, seconds):
        print(f"\n{what}: recovered in {seconds:.0f} s")
        record_property(what, round(seconds, 1))

    return write


def test_a_run_goes_on_without_a_workers_host_that_is_not_replaced_F02(note):
    with cluster_run(workers=2, steps=STEPS) as run:
        run.start()
        run.wait_for_step(FAULT_STEP)
        fault_at_s = time.monotonic()
        run.workers[1].kill()
        note("worker's host killed", run.recovery_s(fault_at_s))
        run.check_finished()
