"""What the driver keeps of one worker, and what it shows of it."""

import os
import pathlib
from typing import Any

import pytest

from driver.fleet.fleet_worker import HeldLease, Worker
from rollout_worker.data.data_digests import digest_data
from rollout_worker.data.prompts import PromptSet
from rollout_worker.worker_records import LeaseOutcome, LeaseResult, News, WorkerInfo
from services.control.messages import WorkerState
from services.process.activity import Activity
from services.process.process_memory import ProcessMemory, process_memory
from services.weights.replica import PullStats
from services.wire.messages import Lease

INFO = WorkerInfo(
    name="rollout-0",
    host="a",
    pid=7,
    devices="1 x NVIDIA H200",
    address="a:1",
    slots=64,
    data=digest_data([PromptSet(prompts=(), overlong=0)]),
    clock_s=1.0,
)
ON_DEVICE = ProcessMemory(host_bytes=10, device_bytes=20, device_peak_bytes=30)


def worker(**changes: Any) -> Worker:
    room: Any = None
    return Worker(name="rollout-0", room=room, **changes)


def lease(attempt: int = 0) -> Lease:
    return Lease(group_id="g0", attempt=attempt, epoch=0, position=0, min_policy_version=0)


def held(attempt: int = 0) -> HeldLease:
    return HeldLease(lease=lease(attempt), given_at=0.0, order_number=2)


def news(*pulls: PullStats) -> News:
    return News(
        drained=False,
        policy_version=3,
        weight_digest="d",
        canary_gap=0.0,
        held=0,
        results=(),
        background_s={},
        transfers=pulls,
        memory=ON_DEVICE,
        activity=Activity(doing="decode", counters={"tokens": 1}),
    )


def pull(wire_bytes: int, seconds: float) -> PullStats:
    return PullStats(
        policy_version=3,
        version_bytes=10**9,
        wire_bytes=wire_bytes,
        delta=False,
        wait_s=0.0,
        seconds=seconds,
        sources=(),
        depth=0,
        failures=(),
    )


def test_its_status_has_its_memory_and_its_last_transfer():
    one = worker(info=INFO, memory=ON_DEVICE, pull_gb_per_s=1.5, state=WorkerState.WORKING)
    status = one.status(100.0)
    assert (status.state, status.tokens_per_s) == (WorkerState.WORKING, 100.0)
    assert (status.slots, status.address, status.devices) == (64, "a:1", "1 x NVIDIA H200")
    assert (status.host_bytes, status.device_bytes, status.device_peak_bytes) == (10, 20, 30)
    assert status.pull_gb_per_s == 1.5


def test_unknown_memory_is_zero_on_the_host_and_minus_one_on_devices():
    status = worker().status(0.0)
    assert (status.host_bytes, status.device_bytes, status.device_peak_bytes) == (0, -1, -1)
    on_cpu = worker(memory=ProcessMemory(host_bytes=5)).status(0.0)
    assert (on_cpu.host_bytes, on_cpu.device_bytes, on_cpu.device_peak_bytes) == (5, -1, -1)


def test_only_transfers_over_the_network_count_as_its_speed():
    one = worker()
    one.receive(news(pull(2 * 10**9, 4.0), pull(0, 0.0)))
    assert (one.policy_version, one.memory, one.pull_gb_per_s) == (3, ON_DEVICE, 0.5)
    one.receive(news())
    assert one.pull_gb_per_s == 0.5


def test_the_end_of_another_attempt_leaves_a_lease_as_it_is():
    one = worker(leases={"g0": held(attempt=1)})
    late, earlier, mine = (
        LeaseResult(
            group_id="g0",
            attempt=attempt,
            order_number=number,
            outcome=LeaseOutcome.RETURNED,
            report=None,
        )
        for attempt, number in ((0, 2), (1, 1), (1, 2))
    )
    assert not one.end_lease(late) and "g0" in one.leases
    assert not one.end_lease(earlier), "as after the learner went back to a checkpoint"
    assert one.end_lease(mine) and not one.leases
    assert not one.end_lease(mine)


@pytest.mark.parametrize(
    "changes, now_s, expected",
    [
        ({"call": "start"}, 9.0, ""),
        ({"call": "start"}, 11.0, "rollout-0 did not start within 10 s"),
        ({"call": "news", "state": WorkerState.READY}, 11.0, ""),
        ({"call": "news", "state": WorkerState.READY}, 21.0, "did not answer within 20 s"),
        ({"call": None}, 21.0, ""),
        ({"call": None, "leases": {"g0": held()}}, 31.0, "did not finish g0 in 30 s"),
    ],
)
def test_each_deadline_names_worker_and_bound(changes, now_s, expected):
    late = worker(**changes).overdue(
        now_s, startup_timeout_s=10.0, answer_timeout_s=20.0, lease_timeout_s=30.0
    )
    assert late.endswith(expected) and bool(late) == bool(expected)


def test_a_post_mortem_tells_a_worker_that_waits_from_one_that_starts():
    handle: Any = object()
    assert worker().table_row(0.0)["state"] == "waiting"
    assert worker(handle=handle).table_row(0.0)["state"] == "starting"


def test_memory_of_this_process_is_that_of_its_pages_and_metrics_leave_out_what_is_unknown():
    memory = process_memory(None)
    assert memory.device_bytes is None and memory.device_peak_bytes is None
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    assert memory.host_bytes == pytest.approx(pages * os.sysconf("SC_PAGE_SIZE"), rel=0.2)
    assert set(memory.metrics("learner")) == {"mem/learner/host_bytes"}
    assert ON_DEVICE.metrics("rollout-0") == {
        "mem/rollout-0/host_bytes": 10.0,
        "mem/rollout-0/device_bytes": 20.0,
        "mem/rollout-0/device_peak_bytes": 30.0,
    }
