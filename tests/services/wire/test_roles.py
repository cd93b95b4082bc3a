"""Checks that every rpc serves the roles that it names, and no other, over real sockets."""

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health

from services.control.messages import Accepted
from services.control.service import control_service
from services.trajectories.service import trajectory_service
from services.weights.service import weight_service
from services.weights.store import WeightStore
from services.wire import roles
from services.wire.channel import open_channel
from services.wire.roles import CALLERS, Role, check_listed, role_of
from services.wire.server import Server
from tests.deadlines import HANG_S
from tests.services.conftest import RUN_ID

SERVICES = (
    "tandem.v1.WeightService",
    "tandem.v1.TrajectoryService",
    "tandem.v1.ControlService",
    health.SERVICE_NAME,
)
NAMES = ("learner", "rollout-0", "rollout-31", "driver", "control")
STRANGERS = ("bench", "control-2", "learner-0", "rollout", "rollout-", "rollout-0x", "Control")


class Handler:
    def scale(self, target, timeout_s):
        return Accepted(target=target, current=1)

    def drain(self, name, timeout_s):
        return Accepted(target=1, current=1)

    def fleet(self):
        raise NotImplementedError


@pytest.fixture(scope="module")
def server(authority, make_buffer):
    services = [
        weight_service(WeightStore(RUN_ID, 2)),
        trajectory_service(make_buffer()),
        control_service(Handler()),
    ]
    with Server(authority.issue("learner"), services) as server:
        yield server


def methods():
    return [
        method
        for service in SERVICES
        for method in descriptor_pool.Default().FindServiceByName(service).methods
    ]


def path_of(method) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def status_of(channel, method) -> grpc.StatusCode:
    """What an empty request of the method is answered with."""
    request = message_factory.GetMessageClass(method.input_type)()
    client, server = method.client_streaming, method.server_streaming
    kind = f"{'stream' if client else 'unary'}_{'stream' if server else 'unary'}"
    call = getattr(channel, kind)(path_of(method), lambda message: message.SerializeToString())
    try:
        answer = call(iter([request]) if client else request, timeout=HANG_S)
        if server:
            list(answer)
    except grpc.RpcError as error:
        return error.code()  # pyright: ignore[reportAttributeAccessIssue]
    return grpc.StatusCode.OK


@pytest.mark.parametrize("name", NAMES + STRANGERS)
def test_every_rpc_serves_its_roles_and_no_other_R11(authority, server, name):
    with open_channel(server.address, authority.issue(name)) as channel:
        denied = {
            path_of(method)
            for method in methods()
            if status_of(channel, method) is grpc.StatusCode.PERMISSION_DENIED
        }
    allowed = {path for path, callers in CALLERS.items() if role_of(name) in callers}
    assert denied == {path_of(method) for method in methods()} - allowed


def test_the_roles_of_each_service_R11():
    workers = {path for path, callers in CALLERS.items() if callers == {Role.ROLLOUT}}
    assert {path.rpartition("/")[2] for path in workers} == {
        "PushGroup",
        "GetManifest",
        "GetDelta",
        "FetchWeights",
    }
    for path, callers in CALLERS.items():
        assert ("ControlService" in path) == (callers == {Role.CONTROL, Role.DRIVER})


def test_an_rpc_without_roles_cannot_be_served(authority, monkeypatch):
    callers = {path: who for path, who in CALLERS.items() if not path.endswith("/GetDelta")}
    for listed in (callers, callers | {"/tandem.v1.WeightService/GetDelta": frozenset()}):
        monkeypatch.setattr(roles, "CALLERS", listed)
        with pytest.raises(ValueError, match="/tandem.v1.WeightService/GetDelta has no roles"):
            Server(authority.issue("learner"), [weight_service(WeightStore(RUN_ID, 2))])


@pytest.mark.parametrize("service", [name for name in SERVICES if name.startswith("tandem")])
def test_every_service_of_ours_is_listed(service):
    check_listed(service)
