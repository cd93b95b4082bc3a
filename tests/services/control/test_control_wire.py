"""The control service over real sockets: what it answers, and to whom."""

import dataclasses

import grpc
import pytest

from services.control.client import ControlClient, ControlFailed
from services.control.messages import (
    ERROR_CHARS,
    Accepted,
    FleetStatus,
    LearnerStatus,
    NoSuchWorker,
    NotNow,
    OutOfBounds,
    ScalingPolicy,
    WorkerState,
    WorkerStatus,
)
from services.control.service import control_service
from services.pb import control_pb2, control_pb2_grpc
from services.wire.channel import CLIENT_OPTIONS
from services.wire.server import Server
from services.wire.tls import Credentials, RunAuthority
from tests.deadlines import HANG_S

FLEET = FleetStatus(
    target=3,
    least=1,
    most=8,
    policy=ScalingPolicy.BALANCE,
    step=17,
    policy_version=16,
    workers=(
        WorkerStatus(
            name="rollout-0",
            state=WorkerState.WORKING,
            policy_version=16,
            host="10.0.0.7",
            pid=4_194_304,
            restarts=2,
            last_error="OSError: gone",
            groups_leased=3,
            groups_done=250,
            tokens_per_s=1234.5,
            slots=64,
            address="10.0.0.7:4711",
            devices="1 x NVIDIA H200",
            host_bytes=5 * 2**30,
            device_bytes=30 * 2**30,
            device_peak_bytes=70 * 2**30,
            pull_gb_per_s=1.25,
        ),
        WorkerStatus(name="rollout-1", state=WorkerState.READY),
        WorkerStatus(name="rollout-2", state=WorkerState.STARTING),
        WorkerStatus(name="rollout-3", state=WorkerState.DRAINING),
        WorkerStatus(name="rollout-4", state=WorkerState.GONE),
    ),
    notice="no room for rollout-5",
    groups_waiting=12,
    groups_out=20,
    learner=LearnerStatus(
        doing="update",
        policy_version=17,
        issued_version=16,
        host="10.0.0.6",
        pid=77,
        devices="8 x TPU v5 lite",
        restarts=1,
        host_bytes=2**33,
        device_bytes=2**34,
        device_peak_bytes=2**35,
    ),
)


class Handler:
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self):
        self.asked = []
        self.answer = Accepted(target=4, current=2)
        self.shown = FLEET

    def scale(self, target, timeout_s):
        return self._answer(target, timeout_s)

    def drain(self, name, timeout_s):
        return self._answer(name, timeout_s)

    def fleet(self):
        self.asked.append("fleet")
        return self.shown

    def _answer(self, wish, timeout_s):
        self.asked.append(wish)
        assert 0 < timeout_s <= 10
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def handler():
    return Handler()


@pytest.fixture
def server(authority, handler):
    with Server(authority.issue("driver"), [control_service(handler)]) as server:
        yield server


@pytest.fixture
def client(authority, server):
    with ControlClient(server.address, authority.issue("control")) as client:
        yield client


def test_requests_and_answers_travel(client, handler):
    assert client.scale(4, 10) == Accepted(target=4, current=2)
    assert client.drain("rollout-1", 10) == Accepted(target=4, current=2)
    assert client.fleet(10) == FLEET
    assert handler.asked == [4, "rollout-1", "fleet"]
    assert FLEET.current == 2


def test_a_client_that_another_thread_has_closed_fails_in_a_sentence(client):
    client.close()
    with pytest.raises(ControlFailed, match="connection to the driver .* was closed before"):
        client.scale(4, 10)


def test_what_is_not_known_travels_as_that(client, handler):
    handler.shown = dataclasses.replace(FLEET, learner=None, workers=FLEET.workers[1:2])
    seen = client.fleet(10)
    assert seen.learner is None
    assert seen.workers[0].device_bytes == seen.workers[0].device_peak_bytes == -1
    handler.shown = dataclasses.replace(FLEET, learner=LearnerStatus(doing="starting"))
    assert client.fleet(10).learner == LearnerStatus(doing="starting", device_bytes=-1)


@pytest.mark.parametrize(
    "refusal",
    [OutOfBounds("9 of 1 to 8"), NoSuchWorker("none"), NotNow("ending"), TimeoutError("busy")],
)
def test_a_refusal_arrives_as_what_it_was(client, handler, refusal):
    handler.answer = refusal
    with pytest.raises(type(refusal), match=str(refusal)):
        client.drain("rollout-9", 10)


def test_a_long_error_of_a_worker_is_cut_and_made_one_line(client, handler):
    worker = dataclasses.replace(FLEET.workers[0], last_error="a b\n" * 1_000)
    handler.shown = dataclasses.replace(FLEET, workers=(worker,) * 4096)
    seen = client.fleet(10).workers
    assert len(seen) == 4096, "the largest fleet fits into a message"
    assert seen[0].last_error == ("a b " * 1_000)[:ERROR_CHARS]


@pytest.mark.parametrize("role", ["rollout-0", "learner", "control-2"])
def test_another_process_of_the_run_may_not_control_it(authority, server, handler, role):
    with ControlClient(server.address, authority.issue(role)) as client:
        for call in (
            lambda: client.scale(8, 10),
            lambda: client.drain("rollout-0", 10),
            lambda: client.fleet(10),
        ):
            with pytest.raises(PermissionError, match=f"the certificate of {role} may not"):
                call()
    assert handler.asked == []


def test_a_certificate_of_another_run_fails_the_handshake(authority, server, handler):
    ours, theirs = authority.issue("control"), RunAuthority.create("run-a").issue("control")
    mixed = Credentials(ca_pem=ours.ca_pem, cert_pem=theirs.cert_pem, key_pem=theirs.key_pem)
    for credentials in (theirs, mixed):
        with (
            ControlClient(server.address, credentials) as client,
            pytest.raises(TimeoutError, match=f"the driver at {server.address} to describe"),
        ):
            client.fleet(1)
    assert handler.asked == []


def test_a_caller_without_a_certificate_fails_the_handshake(authority, server, handler):
    trust = grpc.ssl_channel_credentials(authority.issue("control").ca_pem)
    secure = grpc.secure_channel(server.address, trust, options=CLIENT_OPTIONS)
    for channel in (secure, grpc.insecure_channel(server.address)):
        with channel, pytest.raises(grpc.RpcError) as refused:
            control_pb2_grpc.ControlServiceStub(channel).GetFleet(
                control_pb2.GetFleetRequest(), timeout=HANG_S
            )
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert handler.asked == []
