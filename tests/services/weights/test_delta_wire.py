"""Deltas over real sockets: the same bits for fewer bytes, or all of them."""

import itertools

import grpc
import numpy as np
import pytest

from services.pb import weights_pb2, weights_pb2_grpc
from services.weights.replica import Replica
from services.weights.store import HeldVersion, WeightStore
from services.wire.channel import open_channel
from tests.deadlines import HANG_S
from tests.services.weights.weight_tools import (
    QUESTION_BYTES,
    RUN_ID,
    TENSORS,
    VERSION_BYTES,
    LyingStore,
    is_whole,
    lying_relay,
    nudged,
    version,
)
from tests.services.wire_tools import TcpProxy, reset

CUTS = pytest.mark.parametrize("after_tensor", [0, 3, 5])


@pytest.fixture
def family(learner, make_replica):
    """Learner, a worker and its child, all on version 4 but for an element in a hundred of 5."""
    server, store = learner
    store.publish(5, nudged(5, 0))
    parent, child = make_replica(), make_replica()
    parent.pull(5, [server.address], 10)
    child.pull(5, [parent.address, server.address], 10)
    return server, store, parent, child


def test_delta_travels_down_the_tree_and_makes_the_same_bits(family):
    server, store, parent, child = family
    for step in (1, 2, 3):
        store.publish(5 + step, nudged(5, step))
        full = store.egress_bytes
        for replica, sources in (
            (parent, [server.address]),
            (child, [parent.address, server.address]),
        ):
            pulled = replica.pull(5 + step, sources, 10)
            assert pulled.stats.delta and pulled.stats.failures == ()
            assert pulled.stats.sources == (sources[0],)
            assert is_whole(replica, nudged(5, step))
            assert 0 < pulled.stats.wire_bytes < VERSION_BYTES / 30
        assert store.egress_bytes - full == pulled.stats.wire_bytes
        assert pulled.stats.depth == 2


def test_version_without_a_change_costs_no_byte(family):
    server, store, parent, _ = family
    store.publish(6, nudged(5, 0))
    stats = parent.pull(6, [server.address], 10).stats
    assert stats.delta and stats.wire_bytes == 0 and is_whole(parent, nudged(5, 0))


def full_pull(replica: Replica, policy_version: int, sources: list[str]):
    stats = replica.pull(policy_version, sources, 20).stats
    assert not stats.delta
    return stats


def test_all_is_fetched_where_the_base_is_not_held_or_too_much_changed(family, make_replica):
    server, store, _parent, child = family
    store.publish(6, nudged(5, 1))
    full_pull(make_replica(), 6, [server.address])  # holds nothing
    store.publish(7, nudged(5, 2))
    full_pull(child, 7, [server.address])  # holds 5, of which the learner has no delta
    store.publish(8, version(8))
    full_pull(child, 8, [server.address])  # more than half
    store.publish(9, version(8) | {"extra": np.zeros(3, np.float32)})
    full_pull(child, 9, [server.address])  # another layout
    assert is_whole(child, version(8) | {"extra": np.zeros(3, np.float32)})


def test_base_of_another_history_is_not_taken_for_the_same(family):
    server, store, parent, _ = family
    store.reset(5)
    store.publish(5, nudged(6, 0))
    store.publish(6, nudged(6, 1))
    full_pull(parent, 6, [server.address])
    assert is_whole(parent, nudged(6, 1))


def test_worker_follows_a_learner_that_was_restored(family):
    server, store, parent, child = family
    store.reset(4)
    store.publish(4, nudged(4, 1))
    for replica, sources in ((parent, [server.address]), (child, [parent.address, server.address])):
        stats = full_pull(replica, 4, sources)
        assert stats.policy_version == replica.store.current_version == 4
        assert is_whole(replica, nudged(4, 1))


@pytest.mark.parametrize("at", [0, 2000, 11_000])
def test_delta_that_lies_is_found_and_all_is_fetched(serve, family, at):
    server, store, parent, child = family
    liar_store = LyingStore(flip_delta_at=at)
    store.publish(6, nudged(5, 1))
    parent.pull(6, [server.address], 10)
    liar = lying_relay(serve, liar_store, parent.store.held(6))
    stats = full_pull(child, 6, [liar.address, server.address])
    assert is_whole(child, nudged(5, 1))
    assert stats.failures[0].startswith(f"{liar.address}: ")
    assert "checksum of ['delta']" in stats.failures[0]


def test_delta_with_a_checksum_of_its_own_that_makes_other_bits_is_found(serve, family):
    server, store, _parent, child = family
    store.publish(6, nudged(5, 1))
    manifest = store.wait_for_version(6).manifest
    forger = WeightStore(RUN_ID, 3)
    forger.publish(5, nudged(5, 0))
    forger.publish(6, nudged(5, 2))
    forged = forger.held(6).delta
    assert forged is not None
    forged.made.result(HANG_S)
    honest = store.held(6)
    forger.adopt(HeldVersion(manifest=manifest, stream=honest.stream, depth=1, delta=forged))
    relay = serve(store=forger)
    stats = full_pull(child, 6, [relay.address, server.address])
    assert is_whole(child, nudged(5, 1))
    assert "what the delta from policy version 5 makes does not match" in stats.failures[0]
    assert stats.sources == (relay.address,)  # its version was right


@CUTS
def test_delta_goes_on_after_a_cut(family, after_tensor):
    server, store, parent, _ = family
    store.publish(6, nudged(5, 1))
    delta_bytes = store.delta(6, 5, store.held(5).manifest.digest, 10.0).nbytes
    limit = QUESTION_BYTES + after_tensor * delta_bytes // TENSORS
    limits = itertools.chain([limit], itertools.repeat(None))
    with TcpProxy(server.port, limits, reset, QUESTION_BYTES) as proxy:
        stats = parent.pull(6, [proxy.address], 20).stats
        assert proxy.reached.is_set()
    assert stats.delta and stats.failures == () and is_whole(parent, nudged(5, 1))


def test_parent_that_dies_during_a_delta_is_replaced(family, make_replica):
    server, store, parent, _ = family
    base = parent.store.held(5)
    store.publish(6, nudged(5, 1))
    parent.pull(6, [server.address], 10)
    child = make_replica(patience_s=0.3)
    child.store.adopt(base)
    limits = itertools.chain([9000], itertools.repeat(0))
    with TcpProxy(parent.port, limits, reset, QUESTION_BYTES) as proxy:
        stats = child.pull(6, [proxy.address, server.address], 20).stats
    assert stats.delta and is_whole(child, nudged(5, 1))
    assert stats.sources[-1] == server.address


def delta_request(**changes) -> weights_pb2.GetDeltaRequest:
    fields = dict(run_id=RUN_ID, policy_version=4, base_policy_version=3, base_digest="", wait_s=0)
    return weights_pb2.GetDeltaRequest(**(fields | changes))


@pytest.mark.parametrize(
    "changes, status",
    [
        (dict(), grpc.StatusCode.NOT_FOUND),
        (dict(policy_version=99), grpc.StatusCode.NOT_FOUND),
        (dict(run_id="run-b"), grpc.StatusCode.FAILED_PRECONDITION),
        (dict(wait_s=-1.0), grpc.StatusCode.INVALID_ARGUMENT),
        (dict(wait_s=float("nan")), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_questions_for_a_delta_are_refused_as_the_proto_says(learner, credentials, changes, status):
    server, _ = learner
    with open_channel(server.address, credentials) as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refusal:
            stub.GetDelta(delta_request(**changes), timeout=HANG_S)
        assert refusal.value.code() is status
