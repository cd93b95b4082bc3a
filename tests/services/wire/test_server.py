import socket
import time

import grpc
import pytest

from services.pb import weights_pb2, weights_pb2_grpc
from services.trajectories.client import TrajectoryClient, pack_group
from services.trajectories.codec import TRAJECTORY_SERVICE
from services.weights.codec import WEIGHT_SERVICE
from services.weights.service import weight_service
from services.weights.store import WeightStore
from services.wire.channel import CLIENT_OPTIONS, MESSAGE_CAP_BYTES, open_channel
from services.wire.health import NotServing, check_serving
from services.wire.server import SERVER_OPTIONS, PortUnavailable, Server
from services.wire.tls import RunAuthority
from tests.deadlines import HANG_S


@pytest.fixture
def server(serve, make_buffer):
    return serve(buffer=make_buffer())


def test_health_of_every_service(server, credentials):
    for service in ("", WEIGHT_SERVICE, TRAJECTORY_SERVICE):
        check_serving(server.address, credentials, timeout_s=HANG_S, service=service)


def test_health_of_a_service_that_is_not_hosted(serve, credentials):
    learner_host_1 = serve()
    with pytest.raises(NotServing, match="tandem.v1.TrajectoryService"):
        check_serving(
            learner_host_1.address, credentials, timeout_s=HANG_S, service=TRAJECTORY_SERVICE
        )


def test_server_that_is_not_there_is_named(credentials):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TimeoutError, match=f"waited 0.3 s for .* 127.0.0.1:{port}: .*refused"):
        check_serving(f"127.0.0.1:{port}", credentials, timeout_s=0.3)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_g03_second_server_on_a_port_fails_and_the_first_lives(
    server, authority, credentials, make_buffer, host
):
    store = WeightStore("other-run", 1)
    with pytest.raises(PortUnavailable, match=f"cannot listen on {host} port {server.port}"):
        Server(authority.issue("learner"), [weight_service(store)], host=host, port=server.port)
    check_serving(server.address, credentials, timeout_s=HANG_S)


def test_g03_port_held_by_a_stranger_is_named(authority):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortUnavailable, match=f"port {port}"):
            Server(authority.issue("learner"), [weight_service(WeightStore("r", 1))], port=port)


def test_port_is_free_again_after_stop(authority, credentials):
    store = WeightStore("r", 1)
    first = Server(authority.issue("learner"), [weight_service(store)])
    first.stop(grace_s=0)
    with Server(authority.issue("learner"), [weight_service(store)], port=first.port) as second:
        check_serving(second.address, credentials, timeout_s=HANG_S)


def test_stop_ends_calls_that_wait(serve, credentials):
    server = serve()
    request = weights_pb2.GetManifestRequest(run_id="run-a", wait_s=HANG_S)
    with open_channel(server.address, credentials) as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        waiting = stub.GetManifest.future(request, timeout=HANG_S)
        check_serving(server.address, credentials, timeout_s=HANG_S)
        time.sleep(0.2)  # until the call, sent before the check, waits on the store
        assert not waiting.done()
        start_s = time.monotonic()
        server.stop(grace_s=HANG_S)
        assert time.monotonic() - start_s < HANG_S
        assert not waiting.result().HasField("manifest")


def test_g09_proxy_variable_does_not_break_a_run(monkeypatch, serve, credentials):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = serve()
    address = f"{socket.gethostbyname('localhost')}:{server.port}"
    check_serving(address, credentials, timeout_s=HANG_S)


def test_message_caps_are_finite_and_equal():
    for options in (dict(SERVER_OPTIONS), dict(CLIENT_OPTIONS)):
        assert options["grpc.max_send_message_length"] == MESSAGE_CAP_BYTES == 4 * 2**20
        assert options["grpc.max_receive_message_length"] == MESSAGE_CAP_BYTES


def test_single_message_above_the_cap_names_size_and_limit(server, credentials):
    request = weights_pb2.GetManifestRequest(run_id="x" * (MESSAGE_CAP_BYTES + 1))
    with (
        open_channel(server.address, credentials) as channel,
        pytest.raises(grpc.RpcError) as refusal,
    ):
        weights_pb2_grpc.WeightServiceStub(channel).GetManifest(request, timeout=HANG_S)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MESSAGE_CAP_BYTES) in refusal.value.details()
    assert str(request.ByteSize()) in refusal.value.details()


def channels_of_strangers(address, authority):
    """Channels that know the authority of the run and lack a certificate of it."""
    trusted = authority.issue("nobody").ca_pem
    foreign = RunAuthority.create("run-a").issue("rollout-0")
    for key_pem, cert_pem in ((None, None), (foreign.key_pem, foreign.cert_pem)):
        yield grpc.secure_channel(
            address,
            grpc.ssl_channel_credentials(trusted, key_pem, cert_pem),
            options=CLIENT_OPTIONS,
        )
    yield grpc.insecure_channel(address)


def test_client_without_a_certificate_of_the_run_is_refused(server, authority):
    for channel in channels_of_strangers(server.address, authority):
        with channel, pytest.raises(grpc.RpcError) as refusal:
            weights_pb2_grpc.WeightServiceStub(channel).GetManifest(
                weights_pb2.GetManifestRequest(run_id="run-a"), timeout=HANG_S
            )
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


def test_server_of_another_authority_is_refused(server, make_group):
    foreign = RunAuthority.create("run-a").issue("rollout-0")
    client = TrajectoryClient(server.address, foreign)
    with pytest.raises(TimeoutError, match=f"for learner {server.address} .*CERTIFICATE_VERIFY"):
        client.push_group(pack_group(make_group()), 0.5)
    client.close()
