"""The mailbox of the driver's loop, and what a run leaves for those who may control it."""

import concurrent.futures
import dataclasses
import stat
import threading
import time

import pytest

from driver.fleet.control_server import (
    ControlBox,
    Drain,
    Scale,
    new_target,
    offer_control,
)
from rollout_worker.config.rollout_config import WorkersConfig
from services.control.access import NoAccess, read_access
from services.control.client import ControlClient
from services.control.messages import (
    Accepted,
    FleetStatus,
    NoSuchWorker,
    NotNow,
    OutOfBounds,
    ScalingPolicy,
    WorkerState,
    WorkerStatus,
)
from services.wire.tls import RunAuthority
from tests.deadlines import HANG_S
from tests.ipv6 import needs_ipv6


def fleet_of(*states, target=None, least=1, most=4):
    workers = tuple(
        WorkerStatus(name=f"rollout-{i}", state=WorkerState(state))
        for i, state in enumerate(states)
    )
    return FleetStatus(
        target=len(states) if target is None else target,
        least=least,
        most=most,
        policy=ScalingPolicy.FIXED,
        workers=workers,
    )


@pytest.fixture
def box():
    box = ControlBox(WorkersConfig(min=1, max=4, start=2))
    box.show_fleet(fleet_of("working", "ready"))
    return box


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield pool


def take_one(box):
    deadline = time.monotonic() + HANG_S
    while not (requests := box.take_requests()):
        assert time.monotonic() < deadline, "the request did not arrive"
        time.sleep(0.005)
    (request,) = requests
    return request


@pytest.mark.parametrize(
    "wish, fleet, expected",
    [
        (Scale(target=4), fleet_of("working"), 4),
        (Scale(target=1), fleet_of("working", "working"), 1),
        (Drain(name="rollout-1"), fleet_of("working", "ready"), 1),
        (Drain(name="rollout-0"), fleet_of("starting", "ready", target=4), 3),
    ],
)
def test_what_is_wanted_after_a_wish(wish, fleet, expected):
    assert new_target(wish, fleet) == expected


@pytest.mark.parametrize(
    "wish, fleet, kind, part",
    [
        (Scale(target=5), fleet_of("ready"), OutOfBounds, "5 rollout workers are not between"),
        (Scale(target=0), fleet_of("ready"), OutOfBounds, "min=1 and max=4"),
        (Scale(target=-(2**31)), fleet_of("ready"), OutOfBounds, "min=1 and max=4"),
        (Drain(name="rollout-0"), fleet_of("ready"), OutOfBounds, "0 rollout workers would be"),
        (Drain(name="rollout-7"), fleet_of("ready", "ready"), NoSuchWorker, "rollout-0, rollout-1"),
        (Drain(name="rollout-0"), fleet_of("draining", "ready"), NotNow, "draining already"),
        (Drain(name="rollout-1"), fleet_of("ready", "gone"), NotNow, "gone already"),
    ],
)
def test_a_wish_that_cannot_be_names_the_rule(wish, fleet, kind, part):
    with pytest.raises(kind, match=part):
        new_target(wish, fleet)


def test_the_loop_answers_those_who_wait(box, pool):
    first = pool.submit(box.scale, 3, 10)
    request = take_one(box)
    assert request.wish == Scale(target=3)
    assert not first.done()
    request.accept(3, 2)
    assert first.result(HANG_S) == Accepted(target=3, current=2)
    assert box.fleet().target == 3, "whoever was answered sees what was accepted"
    second = pool.submit(box.drain, "rollout-1", 10)
    request = take_one(box)
    assert request.wish == Drain(name="rollout-1")
    request.refuse(NotNow("a checkpoint is being written"))
    with pytest.raises(NotNow, match="checkpoint"):
        second.result(HANG_S)


def test_what_cannot_be_is_refused_while_the_loop_is_busy(box):
    with pytest.raises(OutOfBounds):
        box.scale(5, 60)
    with pytest.raises(NoSuchWorker):
        box.drain("rollout-9", 60)
    assert box.take_requests() == []


def test_a_request_whose_caller_gave_up_has_no_effect(box):
    with pytest.raises(TimeoutError, match="did not answer: nothing will be done"):
        box.scale(3, 0.05)
    assert box.take_requests() == []


def test_a_request_that_was_taken_and_not_answered_says_that_it_may_have_an_effect(box, pool):
    waiting = pool.submit(box.scale, 3, 1)
    request = take_one(box)
    with pytest.raises(TimeoutError, match="it may still act on it"):
        waiting.result(HANG_S)
    request.accept(3, 2)  # too late, and no error


def test_a_run_that_ends_refuses_those_who_wait_and_those_who_come(box, pool):
    waiting = pool.submit(box.scale, 3, HANG_S)
    deadline = time.monotonic() + HANG_S
    while not box._requests and time.monotonic() < deadline:
        time.sleep(0.005)
    box.close("the run is ending")
    for call in (lambda: waiting.result(HANG_S), lambda: box.scale(3, 10)):
        with pytest.raises(NotNow, match="the run is ending"):
            call()


def test_many_callers_each_get_their_own_answer(pool):
    box = ControlBox(WorkersConfig(min=1, max=4096))
    done = threading.Event()

    def loop():
        while not done.is_set():
            for request in box.take_requests():
                request.accept(request.wish.target, 1)
            done.wait(0.001)

    answering = pool.submit(loop)
    answers = [pool.submit(box.scale, n, HANG_S) for n in range(1, 201)]
    assert [answer.result(HANG_S).target for answer in answers] == list(range(1, 201))
    done.set()
    answering.result(HANG_S)


@pytest.fixture
def authority():
    return RunAuthority.create("run-a")


def test_a_run_can_be_controlled_through_its_folder_while_it_lasts(tmp_path, authority, box, pool):
    stale = tmp_path / "control"
    stale.mkdir()
    (stale / "address").write_text("127.0.0.1:1")  # of a driver that was killed
    offer = offer_control(tmp_path, authority, box, bind_host="127.0.0.1", driver_host="192.0.2.1")
    with offer as address:
        assert address.startswith("127.0.0.1:")
        assert stat.S_IMODE(stale.stat().st_mode) == 0o700
        files = sorted(stale.iterdir())
        assert [file.name for file in files] == ["address", "ca.pem", "cert.pem", "key.pem"]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        dialled, credentials = read_access(tmp_path)
        assert dialled == address
        with ControlClient(dialled, credentials) as client:
            answer = pool.submit(client.scale, 3, 10)
            take_one(box).accept(3, 2)
            assert answer.result(HANG_S).target == 3
            box.show_fleet(dataclasses.replace(box.fleet(), step=9))
            assert client.fleet(10).step == 9
            late = pool.submit(client.scale, 4, 1)
            with pytest.raises(TimeoutError, match=r"the driver was busy for 0\.\d+ s"):
                late.result(HANG_S)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NoAccess, match="is still starting, or is ending"):
        read_access(tmp_path)


def test_a_driver_that_listens_everywhere_is_dialled_by_its_own_address(tmp_path, authority, box):
    with offer_control(
        tmp_path, authority, box, bind_host="0.0.0.0", driver_host="127.0.0.1"
    ) as address:
        host, port = address.split(":")
        assert host == "127.0.0.1" and int(port) > 0
        with ControlClient(*read_access(tmp_path)) as client:
            assert client.fleet(10) == box.fleet()


@needs_ipv6
@pytest.mark.parametrize("bind_host", ["::1", "::", "0:0::0"])
def test_a_driver_is_reached_over_ipv6(tmp_path, authority, box, bind_host):
    with offer_control(tmp_path, authority, box, bind_host=bind_host, driver_host="::1") as address:
        assert address.startswith("[::1]:")
        with ControlClient(*read_access(tmp_path)) as client:
            assert client.fleet(10) == box.fleet()


def test_the_address_of_the_learner_is_not_listened_on(tmp_path, authority, box):
    with offer_control(
        tmp_path, authority, box, bind_host="192.0.2.1", driver_host="127.0.0.1"
    ) as address:
        assert address.startswith("127.0.0.1:")
