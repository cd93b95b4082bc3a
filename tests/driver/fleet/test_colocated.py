"""Learner and worker in one process, as a user runs it: the same training, bit for bit, also when
the process is killed or its worker fails."""

import os
import signal

import pytest

from services.process import failpoints
from tests.driver.service_run import (
    ONE_WORKER,
    STEPS,
    Service,
    same_training,
    undisturbed_run,
    write_model_and_data,
)

COLOCATED = (*ONE_WORKER, "--set", "placement.mode=colocated", "--set", "placement.rollout.cpus=1")

pytestmark = [pytest.mark.slow, pytest.mark.service]


def test_one_process_trains_what_three_train_also_when_it_fails_and_no_weight_travels(
    tmp_path, tmp_path_factory, monkeypatch
):
    separate = undisturbed_run(tmp_path_factory)
    points = tmp_path / "failpoints"
    monkeypatch.setenv(failpoints.VARIABLE, str(points))
    model = write_model_and_data(tmp_path_factory.mktemp("model"))
    service = Service(tmp_path, model, *COLOCATED, hold_after=1)
    try:
        service.wait_for_step(1)
        failpoints.arm(points, "worker.decode", "raise out of order")
        service.wait_for(lambda: "rollout-0 is back" in service.text, "the next process")
        assert "out of order" in service.text, "the worker's own error is named"
        os.kill(service.pid_of("rollout-0"), signal.SIGKILL)
        service.release()
        assert service.wait() == 0, service.text
    finally:
        service.kill()
    assert service.text.count("learner is ready") == 3
    last = service.lines("metrics")[-1]
    assert (last["learner/restarts"], last["workers/restarts"]) == (2, 2)
    assert service.pid_of("learner") == service.pid_of("rollout-0")
    assert separate.pid_of("learner") != separate.pid_of("rollout-0")
    named = {path.name.rpartition("-")[0] for path in (service.out / "stacks").glob("*.txt")}
    assert named == {"dashboard", "driver", "learner"}, "one process answers under one name"
    same_training(service, separate)
    assert len(service.lines("ledger")) == STEPS
    for line in service.lines("ledger"):
        assert set(line["processes"]) == {"learner", "rollout-0"}
    pulled = [line for line in service.lines("metrics") if "weights/pulls" in line]
    assert sum(line["weights/pulls"] for line in pulled) >= STEPS, "one for each step at least"
    assert all(line["weights/wire_bytes"] == 0 for line in pulled)
    assert any(line["weights/wire_bytes"] > 0 for line in separate.lines("metrics")[1:])
    gaps = [line["canary/gap_max"] for line in service.lines("metrics") if "canary/gap_max" in line]
    assert gaps and max(gaps) < 1e-5, "each version was proved by the probe"
