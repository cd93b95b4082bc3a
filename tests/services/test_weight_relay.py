"""Versions from several sources: whoever fails, what arrives is whole, right and of one version."""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import time

import grpc
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_tools import TcpProxy, finish, hold, relay_for_ever, reset

from services.channel import open_channel
from services.digest import tree_digest
from services.pb import weights_pb2, weights_pb2_grpc
from services.relay_tree import ancestors, relay_tree, tree_depth
from services.server import Server
from services.weight_replica import Replica
from services.weight_store import HeldVersion, WeightStore
from services.weight_transfer import WeightTransferError

RUN_ID = "run-a"
TENSORS = 6
TENSOR_BYTES = 128 * 1024
VERSION_BYTES = TENSORS * TENSOR_BYTES
CHUNK_BYTES = 32 * 1024
CUTS = pytest.mark.parametrize("after_tensor", [0, 3, 5])


def version(seed: int) -> dict[str, np.ndarray]:
    """Six bf16 tensors of 128 KiB; another seed has all bytes another."""
    rng = np.random.default_rng(seed)
    shape = (TENSOR_BYTES // 2 // 64, 64)
    return {
        f"layers.{index}.weight": rng.normal(size=shape).astype(ml_dtypes.bfloat16)
        for index in range(TENSORS)
    }


def nudged(seed: int, step: int) -> dict[str, np.ndarray]:
    """`version(seed)` after some steps, each of which changes every hundredth element."""
    tensors = version(seed)
    for index, tensor in enumerate(tensors.values()):
        bits = tensor.view(np.uint16).reshape(-1)
        for past in range(1, step + 1):
            bits[(past + index) % 100 :: 100] ^= 1
        if step:
            bits[:3] = [0x8000, 0x7FC0 + step, 0xFF80]  # -0, nan with a payload, -inf
    return tensors


def is_whole(replica: Replica, tensors: dict[str, np.ndarray]) -> bool:
    """Whether the newest version that the replica serves has these bits."""
    newest = replica.store.wait_for()
    digest = tree_digest(tensors)[1]
    raw = b"".join(tensors[name].tobytes() for name in sorted(tensors))
    return newest.manifest.digest == digest and newest.stream.tobytes() == raw


@pytest.fixture
def learner(serve):
    """A store with version 4, its address, and what it publishes next."""
    store = WeightStore(RUN_ID, 2)
    store.publish(4, version(4))
    server = serve(store=store, chunk_bytes=CHUNK_BYTES)
    return server, store


@pytest.fixture
def make_replica(credentials):
    with contextlib.ExitStack() as replicas:

        def make(**options) -> Replica:
            options = {"patience_s": 5.0, "chunk_bytes": CHUNK_BYTES} | options
            return replicas.enter_context(Replica(credentials, run_id=RUN_ID, **options))

        yield make


@given(count=st.integers(0, 40), fanout=st.integers(1, 5))
def test_nobody_has_more_children_than_the_fanout_and_the_tree_is_flat(count, fanout):
    workers = [f"w{index}" for index in range(count)]
    tree = relay_tree(workers, fanout)
    parents = list(tree.values())
    assert all(parents.count(parent) <= fanout for parent in [None, *workers])
    assert list(tree) == workers
    levels = list(itertools.accumulate(fanout**level for level in range(1, 40)))
    assert tree_depth(tree) == (0 if not count else 1 + sum(total < count for total in levels))
    assert relay_tree([*workers, "new"], fanout).items() >= tree.items()


def test_tree_of_eight():
    tree = relay_tree(list("abcdefgh"), 2)
    assert tree == dict(zip("abcdefgh", [None, None, *"aabbcc"], strict=True))
    assert ancestors(tree, "g") == ["c", "a"] and ancestors(tree, "b") == []
    assert tree_depth(tree) == 3
    assert relay_tree(list("ab"), 0) == {"a": None, "b": None}
    with pytest.raises(ValueError, match="named once, got"):
        relay_tree(list("aa"), 2)
    with pytest.raises(ValueError, match="fanout must be at least 0, got -1"):
        relay_tree(list("a"), -1)


def test_worker_gets_a_version_from_a_worker_and_the_learner_sends_one_copy(learner, make_replica):
    server, store = learner
    parent, child = make_replica(), make_replica()
    first = parent.pull(0, [server.address], 10).stats
    assert (first.depth, first.sources, first.delta) == (1, (server.address,), False)
    pulled = child.pull(0, [parent.address, server.address], 10)
    assert (pulled.stats.depth, pulled.stats.sources) == (2, (parent.address,))
    assert pulled.stats.wire_bytes == pulled.stats.version_bytes == VERSION_BYTES
    assert pulled.stats.failures == ()
    assert tree_digest(pulled.tensors) == tree_digest(version(4))
    assert not any(tensor.flags.writeable for tensor in pulled.tensors.values())
    assert store.egress_bytes == parent.store.egress_bytes == VERSION_BYTES
    again = child.pull(4, [parent.address, server.address], 10)
    assert again.stats.wire_bytes == 0 and again.manifest == pulled.manifest


def test_eight_workers_at_once_cost_the_learner_two_copies(learner, make_replica):
    server, store = learner
    replicas = {f"rollout-{index}": make_replica(patience_s=30.0) for index in range(8)}
    tree = relay_tree(list(replicas), 2)
    sources = {
        name: [*(replicas[relay].address for relay in ancestors(tree, name)), server.address]
        for name in replicas
    }
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        pulls = {
            name: pool.submit(replica.pull, 4, sources[name], 30)
            for name, replica in replicas.items()
        }
    assert all(is_whole(replica, version(4)) for replica in replicas.values())
    assert max(pull.result().stats.depth for pull in pulls.values()) == tree_depth(tree) == 3
    assert store.egress_bytes <= 2.2 * VERSION_BYTES


@CUTS
@pytest.mark.parametrize("cut", [reset, finish, hold])
def test_g06_parent_that_dies_in_mid_transfer_is_replaced_where_it_stopped(
    learner, make_replica, after_tensor, cut
):
    server, store = learner
    parent, child = make_replica(), make_replica(patience_s=0.3, streams=1)
    parent.pull(4, [server.address], 10)
    sent_before = store.egress_bytes
    limit = 6000 + after_tensor * TENSOR_BYTES + 1000
    with TcpProxy(parent.port, [None, limit, *[0] * 99], cut) as proxy:
        proxy.on_limit = lambda: time.sleep(0.15)  # or gRPC drops what has arrived with the call
        pulled = child.pull(4, [proxy.address, server.address], 20)
        assert proxy.reached.is_set()
    assert is_whole(child, version(4))
    assert pulled.stats.wire_bytes == VERSION_BYTES  # nothing came twice
    rest = store.egress_bytes - sent_before
    assert VERSION_BYTES - limit <= rest <= VERSION_BYTES - after_tensor * TENSOR_BYTES + 2**17
    assert pulled.stats.sources[-1] == server.address and len(pulled.stats.failures) == 1
    assert pulled.stats.failures[0].startswith(proxy.address)


def test_g06_parent_that_is_killed_in_mid_transfer_is_replaced(learner, make_replica, authority):
    server, _ = learner
    spawn = multiprocessing.get_context("spawn")
    addresses = spawn.Queue()
    args = (authority.issue("rollout-1"), RUN_ID, server.address, CHUNK_BYTES, addresses)
    parent = spawn.Process(target=relay_for_ever, args=args)
    parent.start()
    port = int(addresses.get(timeout=60).split(":")[1])
    child = make_replica(patience_s=0.5)
    with TcpProxy(port, [None, 3 * TENSOR_BYTES, *[None] * 9], hold) as proxy:
        proxy.on_limit = parent.kill
        pulled = child.pull(4, [proxy.address, server.address], 20)
        assert proxy.reached.is_set() and pulled.stats.sources[-1] == server.address
    parent.join(10)
    assert is_whole(child, version(4))


class LyingStore(WeightStore):
    """A relay that sends other bytes than it received."""

    def __init__(self, flip_at: int | None = None, flip_delta_at: int | None = None):
        super().__init__(RUN_ID, 2, deltas=False)
        self.flip_at, self.flip_delta_at = flip_at, flip_delta_at

    def read(self, policy_version, offset, length):
        return flipped(super().read(policy_version, offset, length), offset, self.flip_at)

    def read_delta(self, policy_version, base_version, offset, length):
        data = super().read_delta(policy_version, base_version, offset, length)
        return flipped(data, offset, self.flip_delta_at)


def flipped(data: memoryview, offset: int, at: int | None) -> memoryview:
    wrong = bytearray(data)
    if at is not None and offset <= at < offset + len(data):
        wrong[at - offset] ^= 0x10
    return memoryview(wrong)


def lying_relay(serve, store: LyingStore, honest: HeldVersion) -> Server:
    store.adopt(honest)
    return serve(store=store, chunk_bytes=CHUNK_BYTES)


@CUTS
def test_g06_wrong_byte_of_a_relay_costs_its_tensor_and_is_named(
    serve, learner, make_replica, after_tensor
):
    server, store = learner
    liar = lying_relay(serve, LyingStore(after_tensor * TENSOR_BYTES + 77), store.held(4))
    child = make_replica()
    pulled = child.pull(4, [liar.address, server.address], 20)
    assert is_whole(child, version(4))
    (failure,) = pulled.stats.failures
    assert failure.startswith(liar.address)
    assert f"checksum of ['layers.{after_tensor}.weight']" in failure
    assert store.egress_bytes < VERSION_BYTES


def test_tensor_of_two_senders_that_is_wrong_is_fetched_again_from_the_learner(
    serve, learner, make_replica
):
    server, store = learner
    liar = lying_relay(serve, LyingStore(3 * TENSOR_BYTES + 77), store.held(4))
    child = make_replica(patience_s=0.3, streams=1)
    limit = 6000 + 3 * TENSOR_BYTES + TENSOR_BYTES // 2
    with TcpProxy(liar.port, [None, limit, *[0] * 99], reset) as proxy:
        proxy.on_limit = lambda: time.sleep(0.15)
        pulled = child.pull(4, [proxy.address, server.address], 20)
    assert is_whole(child, version(4))
    assert [text.split(": ")[0] for text in pulled.stats.failures] == [
        proxy.address,
        server.address,
    ]
    assert "layers.3.weight" in pulled.stats.failures[1]


def test_relay_with_another_manifest_is_refused_and_named(serve, learner, make_replica):
    server, store = learner
    impostor = WeightStore(RUN_ID, 1)
    false_digest = impostor.publish(4, version(99)).digest
    relay = serve(store=impostor)
    child = make_replica()
    pulled = child.pull(4, [relay.address, server.address], 10)
    assert is_whole(child, version(4)) and impostor.egress_bytes == 0
    assert (
        f"{relay.address}: offers policy version 4 with digest {false_digest}"
        in (pulled.stats.failures[0])
    )
    issued = store.digest_of(4)
    fresh = make_replica()
    with pytest.raises(TimeoutError, match=f"{false_digest}, but the learner issued {issued}"):
        fresh.pull(4, [relay.address], 0.3, digest=issued)
    assert fresh.store.current_version == -1


def test_relay_that_gets_the_version_meanwhile_is_waited_for(learner, make_replica):
    server, store = learner
    parent, child = make_replica(), make_replica(patience_s=20.0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(child.pull, 4, [parent.address, server.address], 20)
        time.sleep(0.2)
        assert not waiting.done()
        parent.pull(4, [server.address], 10)
        assert waiting.result(20).stats.sources == (parent.address,)
    assert store.egress_bytes == VERSION_BYTES


def test_relay_that_does_not_get_the_version_is_passed_over(learner, make_replica):
    server, _ = learner
    parent, child = make_replica(), make_replica(patience_s=0.3)
    pulled = child.pull(4, [parent.address, "127.0.0.1:9", server.address], 10)
    assert is_whole(child, version(4)) and pulled.stats.depth == 1
    assert "nothing newer than policy version -1" in pulled.stats.failures[0]
    assert pulled.stats.failures[1].startswith("127.0.0.1:9: ")


def test_nobody_waits_for_a_relay_before_the_learner_has_the_version(learner, make_replica):
    server, store = learner
    parent, child = make_replica(), make_replica(patience_s=0.5)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(child.pull, 5, [parent.address, server.address], 20)
        time.sleep(1.0)
        store.publish(5, version(5))
        parent.pull(5, [server.address], 10)
        stats = waiting.result(20).stats
    assert stats.sources == (parent.address,) and stats.wait_s > 0.9


def test_relays_serve_on_while_the_learner_is_away(serve, learner, make_replica):
    server, _ = learner
    parent, child = make_replica(), make_replica(patience_s=0.3)
    parent.pull(4, [server.address], 10)
    server.stop(0)
    pulled = child.pull(4, [parent.address, server.address], 10)
    assert is_whole(child, version(4)) and pulled.stats.depth == 2


def test_version_that_does_not_come_names_the_sources(learner, make_replica):
    server, _ = learner
    child = make_replica(patience_s=0.2)
    with pytest.raises(TimeoutError, match=f"waited 0.4 s .*>= 9 from {server.address}: .* than 4"):
        child.pull(9, [server.address], 0.4)
    with pytest.raises(TimeoutError, match="127.0.0.1:9: .*refused"):
        child.pull(9, ["127.0.0.1:9"], 0.3)
    with pytest.raises(ValueError, match="needs the address of a learner"):
        child.pull(9, [child.address], 0.3)


def test_pull_that_fails_leaves_what_was_held_and_the_next_succeeds(learner, make_replica):
    server, store = learner
    child = make_replica(deltas=False)
    with TcpProxy(server.port, itertools.repeat(None), reset) as proxy:
        child.pull(4, [proxy.address], 10)
        store.publish(5, version(5))
        proxy.limits = itertools.chain([3 * TENSOR_BYTES], itertools.repeat(3000))
        with pytest.raises(WeightTransferError, match=f"5 could not be pulled: {proxy.address}"):
            child.pull(5, [proxy.address], 10, transfer_timeout_s=0.7)
        assert is_whole(child, version(4))
        proxy.heal()
        child.pull(5, [proxy.address], 10)
    assert is_whole(child, version(5))


def test_worker_of_another_run_is_refused_at_once(learner, credentials):
    server, _ = learner
    with (
        Replica(credentials, run_id="run-b") as stranger,
        pytest.raises(WeightTransferError, match="belongs to run 'run-a', the caller to 'run-b'"),
    ):
        stranger.pull(0, [server.address], 30)


def test_close_ends_a_pull_that_waits(learner, make_replica):
    server, _ = learner
    child = make_replica()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(child.pull, 99, [server.address], 60)
        time.sleep(0.2)
        start_s = time.monotonic()
        child.close()
        with pytest.raises(WeightTransferError, match="stopped"):
            waiting.result(10)
    assert time.monotonic() - start_s < 5


def test_memory_goes_round_between_two_versions(learner, make_replica):
    server, store = learner
    child = make_replica(deltas=False)
    places = []
    for policy_version in range(5, 11):
        store.publish(policy_version, version(policy_version))
        pulled = child.pull(policy_version, [server.address], 10)
        assert tree_digest(pulled.tensors) == tree_digest(version(policy_version))
        places.append(min(tensor.ctypes.data for tensor in pulled.tensors.values()))
        del pulled
    assert len(set(places)) == 2


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
    server, store, parent, child = family
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
    server, store, parent, child = family
    store.publish(6, nudged(5, 1))
    manifest = store.manifest(6)
    forger = WeightStore(RUN_ID, 3)
    forger.publish(5, nudged(5, 0))
    forger.publish(6, nudged(5, 2))
    forged = forger.held(6).delta
    assert forged is not None
    forged.made.result(10)
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
    delta_bytes = store.delta(6, 5, store.digest_of(5), 10.0).nbytes
    limit = 4200 + after_tensor * delta_bytes // TENSORS
    with TcpProxy(server.port, [None, limit, *[None] * 9], reset) as proxy:
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
    with TcpProxy(parent.port, [None, 9000, *[0] * 99], reset) as proxy:
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
            stub.GetDelta(delta_request(**changes), timeout=10)
        assert refusal.value.code() is status
