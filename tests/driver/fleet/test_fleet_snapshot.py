"""What is told of workers and learner, and what is said where nobody told it."""

import dataclasses
from typing import Any

from driver.fleet.fleet_records import FleetState, Worker
from driver.fleet.fleet_snapshot import learner_status, worker_status
from learner.learner_records import LearnerHealth
from services.control.messages import LearnerStatus, WorkerState
from services.process.process_memory import ProcessMemory, process_memory
from services.trajectories.buffer_records import BufferCounts

ABOUT = {
    "host": "a",
    "pid": 7,
    "devices": "1 x NVIDIA H200",
    "address": "a:1",
    "slots": 64,
    "clock_s": 1.0,
}
ON_DEVICE = ProcessMemory(host_bytes=10, device_bytes=20, device_peak_bytes=30)


def worker(**changes: Any) -> Worker:
    room: Any = None
    return Worker(name="rollout-0", room=room, actor=None, **changes)


def test_a_worker_is_told_with_its_memory_and_its_last_transfer():
    one = worker(about=ABOUT, memory=ON_DEVICE, pull_gb_per_s=1.5, state=FleetState.WORKING)
    status = worker_status(one, 100.0)
    assert (status.state, status.tokens_per_s) == (WorkerState.WORKING, 100.0)
    assert (status.slots, status.address, status.devices) == (64, "a:1", "1 x NVIDIA H200")
    assert (status.host_bytes, status.device_bytes, status.device_peak_bytes) == (10, 20, 30)
    assert status.pull_gb_per_s == 1.5


def test_what_nobody_told_is_nothing_on_the_host_and_minus_one_on_devices():
    status = worker_status(worker(), 0.0)
    assert (status.host_bytes, status.device_bytes, status.device_peak_bytes) == (0, -1, -1)
    on_cpu = worker_status(worker(memory=ProcessMemory(host_bytes=5)), 0.0)
    assert (on_cpu.host_bytes, on_cpu.device_bytes, on_cpu.device_peak_bytes) == (5, -1, -1)


def test_the_learner_is_absent_then_starting_then_as_it_says():
    assert learner_status({}, None, 0) is None
    assert learner_status(ABOUT, None, 1) == LearnerStatus(
        doing="starting", host="a", pid=7, devices="1 x NVIDIA H200", restarts=1
    )
    names = [field.name for field in dataclasses.fields(BufferCounts)]
    health = LearnerHealth(
        problem="",
        doing="update",
        policy_version=4,
        issued_version=3,
        counts=BufferCounts(**dict.fromkeys(names, 0)),
        memory=ON_DEVICE,
    )
    status = learner_status(ABOUT, health, 1)
    assert status is not None and (status.doing, status.issued_version) == ("update", 3)
    assert (status.host_bytes, status.device_peak_bytes) == (10, 30)


def test_memory_of_this_process_is_that_of_its_pages_and_metrics_leave_out_what_is_unknown():
    before = process_memory(None)
    assert before.device_bytes is None and before.device_peak_bytes is None
    ballast = bytearray(b"x" * 2**26)
    grown = process_memory((2**30, 2**31)).host_bytes - before.host_bytes
    assert 2**25 < grown < 2**28 and len(ballast) == 2**26
    assert set(before.metrics("learner")) == {"mem/learner/host_bytes"}
    assert ON_DEVICE.metrics("rollout-0") == {
        "mem/rollout-0/host_bytes": 10.0,
        "mem/rollout-0/device_bytes": 20.0,
        "mem/rollout-0/device_peak_bytes": 30.0,
    }
