"""Groups over real sockets: each arrives whole and once, or the worker learns why not."""

import hashlib
import itertools
import threading

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.pb import trajectories_pb2, trajectories_pb2_grpc
from services.trajectories import codec
from services.trajectories.client import TrajectoryClient, pack_group
from services.trajectories.group_buffer import GroupBuffer
from services.trajectories.receipts import StaleGroup, UnknownReceipt
from services.trajectories.service import trajectory_service
from services.wire.channel import open_channel
from services.wire.messages import PushOutcome
from services.wire.server import Server
from tests.deadlines import HANG_S
from tests.services.group_rules import group_rules
from tests.services.wire_tools import TcpProxy, hold, reset, same_group

pytestmark = pytest.mark.slow

DIGEST = "d" * 64
INVALID = grpc.StatusCode.INVALID_ARGUMENT
Request = trajectories_pb2.PushGroupRequest
Header = trajectories_pb2.PushGroupHeader


@pytest.fixture
def buffer(make_buffer):
    buffer = make_buffer(capacity_bytes=2**29)
    buffer.issue(0, DIGEST)
    return buffer


@pytest.fixture
def server(serve, buffer):
    return serve(buffer=buffer)


@pytest.fixture
def client(server, credentials):
    client = TrajectoryClient(server.address, credentials)
    yield client
    client.close()


@pytest.fixture
def stub(server, credentials):
    with open_channel(server.address, credentials) as channel:
        yield trajectories_pb2_grpc.TrajectoryServiceStub(channel)


def test_group_arrives_whole_and_once(client, buffer, make_group):
    group = make_group()
    outcomes = [client.push_group(pack_group(group), 10), client.push_group(pack_group(group), 10)]
    assert outcomes == [PushOutcome.ACCEPTED, PushOutcome.DUPLICATE]
    (received,) = buffer.take_groups(["g1"], 1).groups
    assert same_group(received, group)
    assert client.push_group(pack_group(make_group(attempt=1)), 10) is PushOutcome.DUPLICATE
    counts = buffer.counts()
    assert (counts.received, counts.accepted, counts.duplicate) == (3, 1, 2)


def test_r08_received_arrays_can_be_changed_in_place(client, buffer, make_group):
    client.push_group(pack_group(make_group()), 10)
    (received,) = buffer.take_groups(["g1"], 1).groups
    received.prompt_token_ids[0] = 1
    for completion in received.completions:
        completion.token_ids[0] = 1
        completion.behavior_logprobs[0] = -1.0


@pytest.mark.parametrize("nbytes", [4194303, 4194304, 4194305, 17825792, 134217729])
def test_g01_group_of_any_size_arrives(client, buffer, make_group, make_completion, nbytes):
    T = (nbytes - 4096) // 8
    completion = make_completion(
        token_ids=np.arange(T, dtype=np.int32) % 369,
        behavior_logprobs=-(np.arange(T, dtype=np.float32) % 64),
    )
    group = make_group(completions=(completion, make_completion(1)), worker="w" * 999)
    missing = nbytes - len(codec.encode_group(group))
    group = make_group(completions=(completion, make_completion(1)), worker="w" * (999 + missing))
    assert len(codec.encode_group(group)) == nbytes
    assert client.push_group(pack_group(group), 60) is PushOutcome.ACCEPTED
    (received,) = buffer.take_groups(["g1"], 1).groups
    assert same_group(received, group)


def test_group_above_the_limit_is_refused_by_its_header(serve, buffer, credentials, make_group):
    server = serve(buffer=buffer, max_group_bytes=300)
    client = TrajectoryClient(server.address, credentials)
    nbytes = len(codec.encode_group(make_group(worker="w" * 300)))
    with pytest.raises(ValueError, match=f"may have 1 to 300 bytes, got {nbytes}"):
        client.push_group(pack_group(make_group(worker="w" * 300)), 10)
    client.close()


@pytest.mark.parametrize(
    "refusal, changes",
    [
        (ValueError, {"run_id": "run-b"}),
        (ValueError, {"completions": ()}),
        (StaleGroup, {}),
        (UnknownReceipt, {"policy_version": 1, "weight_digest": DIGEST}),
        (UnknownReceipt, {"policy_version": 7}),
    ],
)
def test_refusal_reaches_the_worker_by_its_name(
    client, server, buffer, make_group, refusal, changes
):
    buffer.issue(1, "e" * 64)
    with pytest.raises(refusal, match=f"learner {server.address}: .*'?g"):
        client.push_group(pack_group(make_group(**changes)), 10)
    assert buffer.counts().accepted == 0


@pytest.mark.parametrize("cut", [1, 700, 1400, 2100])
def test_push_that_is_reset_is_used_once(server, buffer, credentials, make_group, cut):
    with TcpProxy(server.port, itertools.chain([cut], itertools.repeat(None)), reset) as proxy:
        client = TrajectoryClient(proxy.address, credentials)
        client.push_group(pack_group(make_group()), 20)
        client.close()
    assert buffer.counts().accepted == 1 and len(buffer.take_groups(["g1"], 0).groups) == 1


def test_a_worker_waits_for_room_until_its_deadline(serve, make_buffer, credentials, make_group):
    buffer = make_buffer(capacity_groups=1)
    buffer.issue(0, DIGEST)
    client = TrajectoryClient(serve(buffer=buffer).address, credentials)
    client.push_group(pack_group(make_group("a")), 10)
    with pytest.raises(
        TimeoutError, match="waited 0.3 s for learner .* to take .*'b'.*no room.* 1 of 1 groups"
    ):
        client.push_group(pack_group(make_group("b")), 0.3)
    room = threading.Timer(0.3, lambda: buffer.take_groups(["a"], 1))
    room.start()
    assert client.push_group(pack_group(make_group("b")), 20) is PushOutcome.ACCEPTED
    room.join()
    assert buffer.counts().full >= 3
    client.close()


def test_a_learner_whose_disk_is_full_is_waited_for(serve, credentials, make_group):
    problems = [OSError(28, "No space left on device")] * 3

    def store(group):
        if problems:
            raise problems.pop()

    buffer = GroupBuffer(
        group_rules("run-a"),
        capacity_groups=8,
        capacity_bytes=2**20,
        max_staleness=0,
        store=store,
    )
    buffer.issue(0, DIGEST)
    client = TrajectoryClient(serve(buffer=buffer).address, credentials)
    assert client.push_group(pack_group(make_group()), 20) is PushOutcome.ACCEPTED
    counts = buffer.counts()
    assert (counts.not_stored, counts.accepted, counts.received) == (3, 1, 4)
    problems += [OSError(28, "No space left on device")] * 99
    with pytest.raises(TimeoutError, match="'g2'.*is not accepted: .*No space left on device"):
        client.push_group(pack_group(make_group("g2")), 0.3)
    client.close()


class CutAfterPut(GroupBuffer):
    """Loses the line after it took a group in, so that the answer never arrives."""

    cut = staticmethod(lambda: None)

    def put_group(self, group):
        outcome = super().put_group(group)
        self.cut()
        return outcome


def test_push_whose_answer_is_lost_is_used_once(serve, credentials, make_group):
    buffer = CutAfterPut(
        group_rules("run-a"), capacity_groups=8, capacity_bytes=2**20, max_staleness=0
    )
    buffer.issue(0, DIGEST)
    with TcpProxy(serve(buffer=buffer).port, itertools.repeat(None), reset) as proxy:
        buffer.cut = proxy.reset_all
        client = TrajectoryClient(proxy.address, credentials)
        assert client.push_group(pack_group(make_group()), 20) is PushOutcome.DUPLICATE
        client.close()
    counts = buffer.counts()
    assert (counts.accepted, counts.duplicate, counts.waiting) == (1, 1, 1)


def test_push_waits_for_a_learner_that_comes_up_late(serve, buffer, credentials, make_group):
    port = serve(buffer=buffer).port
    with TcpProxy(1, itertools.repeat(None), reset) as proxy:
        client = TrajectoryClient(proxy.address, credentials)
        late = threading.Timer(0.4, lambda: setattr(proxy, "target_port", port))
        late.start()
        assert client.push_group(pack_group(make_group()), 20) is PushOutcome.ACCEPTED
        late.join()
        client.close()


def test_learner_that_is_gone_is_named(credentials, make_group):
    client = TrajectoryClient("127.0.0.1:1", credentials)
    with pytest.raises(TimeoutError, match="waited 0.3 s for learner 127.0.0.1:1 to take .*'g1'"):
        client.push_group(pack_group(make_group()), 0.3)
    client.close()


def test_learner_that_hangs_is_named(server, credentials, make_group):
    with TcpProxy(server.port, itertools.repeat(100), hold) as proxy:
        client = TrajectoryClient(proxy.address, credentials)
        with pytest.raises(TimeoutError, match=f"waited 0.3 s for learner {proxy.address}"):
            client.push_group(pack_group(make_group()), 0.3)
        client.close()


def header(raw: bytes, **changes) -> Request:
    fields = dict(run_id="run-a", group_id="g1", attempt=0, size_bytes=len(raw))
    fields |= {"sha256": hashlib.sha256(raw).digest()} | changes
    return Request(header=Header(**fields))


def malformed_pushes(raw: bytes):
    half = len(raw) // 2
    whole = Request(data=raw)
    flipped = raw[:half] + bytes([raw[half] ^ 1]) + raw[half + 1 :]
    yield "must be its header", []
    yield "must be its header", [whole]
    yield "must be its header", [Request()]
    yield "0 bytes came, 999 were announced", [header(raw, size_bytes=999)]
    yield f"{half} bytes came, {len(raw)} were", [header(raw), Request(data=raw[:half])]
    yield "more than the", [header(raw), whole, Request(data=b"x")]
    yield "must carry data", [header(raw), header(raw)]
    yield "must carry data", [header(raw), Request(data=b""), whole]
    yield "may have 1 to", [header(raw, size_bytes=0)]
    yield "may have 1 to", [header(raw, size_bytes=-5)]
    yield "may have 1 to 536870912 bytes, got 1073741824", [header(raw, size_bytes=2**30)]
    yield "do not match the sha256", [header(raw), Request(data=flipped)]
    yield "do not match the sha256", [header(raw, sha256=b""), whole]
    yield "header announces", [header(raw, group_id="other"), whole]
    yield "header announces", [header(raw, run_id="run-b"), whole]
    yield "header announces", [header(raw, attempt=2), whole]
    yield "are not a tandem.v1.Group", [header(b"\xff" * 9), Request(data=b"\xff" * 9)]


def test_malformed_push_is_refused_and_counted(stub, buffer, make_group):
    pushes = list(malformed_pushes(codec.encode_group(make_group())))
    for message, requests in pushes:
        with pytest.raises(grpc.RpcError) as refusal:
            stub.PushGroup(iter(requests), timeout=HANG_S)
        assert refusal.value.code() is INVALID, refusal.value
        assert message in refusal.value.details()
    counts = buffer.counts()
    assert (counts.malformed, counts.received, counts.waiting) == (len(pushes), len(pushes), 0)


def test_field_of_the_wrong_width_is_refused(stub, make_group):
    message = trajectories_pb2.Group.FromString(codec.encode_group(make_group()))
    message.completions[0].behavior_logprobs += b"\0"
    raw = message.SerializeToString()
    with pytest.raises(grpc.RpcError, match="13 bytes, which is not a multiple of 4") as refusal:
        stub.PushGroup(iter([header(raw), Request(data=raw)]), timeout=HANG_S)
    assert refusal.value.code() is INVALID


def test_text_of_a_refusal_is_bounded(client, make_group):
    with pytest.raises(ValueError) as refusal:
        client.push_group(pack_group(make_group(run_id="r" * 100_000)), 10)
    assert len(str(refusal.value)) < 1200


@pytest.fixture(scope="module")
def fuzzed(authority, credentials, make_buffer):
    """A server that lives through all examples, its buffer, and a channel without a codec."""
    buffer = make_buffer()
    buffer.issue(0, DIGEST)
    with (
        Server(authority.issue("learner"), [trajectory_service(buffer)]) as server,
        open_channel(server.address, credentials) as channel,
    ):
        yield buffer, channel.stream_unary(f"/{codec.TRAJECTORY_SERVICE}/PushGroup"), channel


@given(st.data())
def test_fuzzed_push_never_crashes_the_server(fuzzed, make_group, data):
    buffer, push_raw, channel = fuzzed
    raw = bytearray(codec.encode_group(make_group("fuzz")))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    group = header(bytes(raw), group_id="fuzz").SerializeToString()
    messages = data.draw(
        st.one_of(
            st.just([group, Request(data=bytes(raw)).SerializeToString()]),
            st.lists(st.binary(max_size=60), max_size=3),
            st.lists(st.binary(max_size=60), max_size=3).map(lambda tail: [group, *tail]),
        )
    )
    try:
        push_raw(iter(messages), timeout=HANG_S)
    except grpc.RpcError as error:
        assert error.code() in {
            INVALID,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.INTERNAL,  # gRPC's own answer to a message that does not parse
        }, error
    buffer.forget(["fuzz"])
    buffer.restore({"consumed_group_ids": []})
    stub = trajectories_pb2_grpc.TrajectoryServiceStub(channel)
    good = codec.encode_group(make_group("good"))
    response = stub.PushGroup(
        iter([header(good, group_id="good"), Request(data=good)]), timeout=HANG_S
    )
    assert response.outcome == trajectories_pb2.PushGroupResponse.ACCEPTED
    buffer.restore({"consumed_group_ids": []})
