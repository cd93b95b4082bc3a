"""Learner and worker in one process, as a user runs it: the same training, bit for bit, also when
the process is killed or its worker fails."""

import os
import signal

import pytest

from services.process import failpoints
from tests.driver.service_run import (
    STEPS,
    Service,
    same_training,
    undisturbed_run,
    write_model_and_data,
)

COLOCATED = (
    *("--set", "rollout.workers=1"),
    *("--set", "placement.mode=colocated"),
    *("--set", "placement.rollout.cpus=1"),
)

pytestmark = [pytest.mark.slow, pytest.mark.service]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model_and_data(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    return undisturbed_run(tmp_path_factory)


@pytest.fixture
def start(tmp_path, model):
    """Starts a colocated run; kills what a failed test leaves."""
    services = []

    def one(*arguments: str) -> Service:
        services.append(Service(tmp_path, model, *COLOCATED, *arguments))
        return services[-1]

    yield one
    for service in services:
        if service.process.poll() is None:
            os.killpg(service.process.pid, signal.SIGKILL)


def test_one_process_trains_what_two_train_and_no_weight_travels(start, separate):
    service = start()
    assert service.wait() == 0, service.text
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


def test_a_worker_that_fails_and_a_process_that_is_killed_are_replaced_and_change_nothing(
    start, separate, tmp_path, monkeypatch
):
    points = tmp_path / "failpoints"
    monkeypatch.setenv(failpoints.VARIABLE, str(points))
    service = start()
    service.wait_for_step(1)
    failpoints.arm(points, "worker.decode", "raise out of order")
    service.wait_for(lambda: service.text.count("rollout-0 is back") == 1, "the next process")
    assert "out of order" in service.text, "the worker's own error is named"
    os.kill(service.pid_of("rollout-0"), signal.SIGKILL)
    assert service.wait() == 0, service.text
    assert service.text.count("learner is ready") == 3
    same_training(service, separate)
    last = service.lines("metrics")[-1]
    assert (last["learner/restarts"], last["workers/restarts"]) == (2, 2)
