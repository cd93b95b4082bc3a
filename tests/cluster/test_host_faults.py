"""Whole hosts that fail, in a run over several of them: `make cluster`."""

import json
import re
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


def test_a_learners_host_that_is_killed_is_replaced_by_another_three_times_F02(note):
    with cluster_run(workers=2, steps=STEPS + 6) as run:
        run.start()
        for loss in (1, 2, 3):
            run.wait_for_step(run.closed_step() + FAULT_STEP)
            fault_at_s = time.monotonic()
            run.learner.kill()
            run.learner = run.add_learner_host(f"spare{loss}")
            note(f"learner's host killed, loss {loss}", run.recovery_s(fault_at_s))
        run.check_finished()


def test_a_learners_host_that_is_cut_off_and_comes_back_does_no_harm_F03(note):
    with cluster_run(workers=2, steps=STEPS) as run:
        run.start()
        run.wait_for_step(FAULT_STEP)
        fault_at_s = time.monotonic()
        run.learner.unplug()
        run.add_learner_host("spare")
        note("learner's host partitioned", run.recovery_s(fault_at_s))
        run.learner.plug()
        run.check_finished()


def test_a_worker_and_the_learner_that_cannot_reach_each_other_are_reported_F05(note):
    with cluster_run(workers=2, steps=STEPS) as run:
        run.start()
        run.wait_for_step(FAULT_STEP)
        cut_off, before = run.worker_on(run.workers[1]), len(run.output())
        fault_at_s = time.monotonic()
        run.workers[1].block(run.learner)
        note("worker and learner cut apart", run.recovery_s(fault_at_s))
        said = run.output()[before:]
        assert re.search(rf"{cut_off}\b.*no answer from the learner", said), said
        run.workers[1].unblock(run.learner)
        run.check_finished()


def test_a_host_with_another_evaluation_file_is_refused_and_named_F04():
    with cluster_run(workers=2, steps=STEPS) as run:
        hosts = [run.head, run.learner, *run.workers]
        for host in hosts:
            answer = "#### 3" if host is hosts[-1] else "#### 2"
            item = {"question": "1 + 1", "answer": answer}
            (host.tmp / "eval.jsonl").write_text(json.dumps(item) + "\n")
        run.start("data.eval={source: /tmp/eval.jsonl}", "eval.at_end=true")
        assert run.wait_for_failure() == 1
        assert run.closed_step() == 0
        assert "worker1" in run.output() and "/tmp/eval.jsonl" in run.output()
