"""Versions from several sources: whoever fails, what arrives is whole, right and of one version."""

import concurrent.futures
import itertools
import multiprocessing
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.weights.digest import tree_digest
from services.weights.relay_tree import ancestors, host_tree, relay_tree, tree_depth
from services.weights.replica import Replica
from services.weights.store import WeightStore
from services.weights.transfer import WeightTransferError
from tests.deadlines import HANG_S
from tests.services.weights.weight_tools import (
    CHUNK_BYTES,
    QUESTION_BYTES,
    RUN_ID,
    TENSOR_BYTES,
    VERSION_BYTES,
    LyingStore,
    is_whole,
    lying_relay,
    version,
)
from tests.services.wire_tools import TcpProxy, finish, hold, relay_for_ever, reset

pytestmark = pytest.mark.slow

CUTS = pytest.mark.parametrize("after_tensor", [0, 3, 5])


@given(count=st.integers(0, 40), fanout=st.integers(1, 5))
def test_no_source_has_more_children_than_the_fanout_and_the_tree_is_flat(count, fanout):
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


def test_a_version_travels_to_each_host_once_F09():
    hosts = {"a0": "a", "b0": "b", "a1": "a", "c0": "c", "b1": "b", "a2": "a", "a3": "a"}
    tree = host_tree(hosts, 2)
    across = [one for one, parent in tree.items() if parent is None or hosts[parent] != hosts[one]]
    assert sorted(across) == ["a0", "b0", "c0"]
    assert {one: tree[one] for one in ("a0", "b0", "c0")} == {"a0": None, "b0": None, "c0": "a0"}
    assert {one: tree[one] for one in ("a1", "a2", "a3")} == {"a1": "a0", "a2": "a0", "a3": "a1"}
    assert ancestors(tree, "a3") == ["a1", "a0"]


def test_workers_of_one_host_each_or_of_one_host_all_are_a_plain_tree_F09():
    names = list("abcdefg")
    assert host_tree({name: name for name in names}, 2) == relay_tree(names, 2)
    alone = host_tree(dict.fromkeys(names, "host"), 3)
    assert [name for name, parent in alone.items() if parent is None] == ["a"]
    assert host_tree(dict.fromkeys(names, "host"), 0) == dict.fromkeys(names)


def test_a_worker_that_joins_moves_nobody_F09():
    hosts = {"a0": "a", "b0": "b", "a1": "a"}
    for joined in ("a", "b", "c"):
        assert host_tree(hosts | {"new": joined}, 2).items() >= host_tree(hosts, 2).items()


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
    replicas = {f"rollout-{index}": make_replica(patience_s=HANG_S) for index in range(8)}
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
    assert tree_depth(tree) == 3
    # A busy machine may be slow to connect to a relay, which is then passed over.
    assert 2 <= max(pull.result().stats.depth for pull in pulls.values()) <= 3
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
    limits = itertools.chain([limit], itertools.repeat(0))
    with TcpProxy(parent.port, limits, cut, QUESTION_BYTES) as proxy:
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
    port = int(addresses.get(timeout=HANG_S).split(":")[1])
    child = make_replica(patience_s=0.5)
    limits = itertools.chain([3 * TENSOR_BYTES], itertools.repeat(None))
    with TcpProxy(port, limits, hold, QUESTION_BYTES) as proxy:
        proxy.on_limit = parent.kill
        pulled = child.pull(4, [proxy.address, server.address], 20)
        assert proxy.reached.is_set() and pulled.stats.sources[-1] == server.address
    parent.join(HANG_S)
    assert is_whole(child, version(4))


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
    limits = itertools.chain([limit], itertools.repeat(0))
    with TcpProxy(liar.port, limits, reset, QUESTION_BYTES) as proxy:
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
    issued = store.held(4).manifest.digest
    fresh = make_replica()
    with pytest.raises(TimeoutError, match=f"{false_digest}, but the learner issued {issued}"):
        fresh.pull(4, [relay.address], 0.3, digest=issued)
    assert fresh.store.current_version == -1


def test_relay_that_gets_the_version_meanwhile_is_waited_for(learner, make_replica):
    server, store = learner
    parent, child = make_replica(), make_replica(patience_s=HANG_S)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(child.pull, 4, [parent.address, server.address], 20)
        time.sleep(0.2)
        assert not waiting.done()
        parent.pull(4, [server.address], 10)
        assert waiting.result(HANG_S).stats.sources == (parent.address,)
    assert store.egress_bytes == VERSION_BYTES


def test_relay_that_does_not_get_the_version_is_passed_over(learner, make_replica):
    server, _ = learner
    parent, child = make_replica(), make_replica(patience_s=0.3)
    pulled = child.pull(4, [parent.address, "127.0.0.1:9", server.address], 10)
    assert is_whole(child, version(4)) and pulled.stats.depth == 1
    assert pulled.stats.failures[0].startswith(f"{parent.address}: ")
    # How far a busy machine gets in 0.3 s: an answer that names what is held, or none.
    assert re.search("nothing newer than policy version -1|DEADLINE", pulled.stats.failures[0])
    assert pulled.stats.failures[1].startswith("127.0.0.1:9: ")


def test_no_worker_waits_for_a_relay_before_the_learner_has_the_version(learner, make_replica):
    server, store = learner
    parent, child = make_replica(), make_replica(patience_s=0.5)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(child.pull, 5, [parent.address, server.address], 20)
        time.sleep(1.0)
        store.publish(5, version(5))
        parent.pull(5, [server.address], 10)
        stats = waiting.result(HANG_S).stats
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
    with pytest.raises(TimeoutError, match=f"waited 0.4 s .*>= 9 from {server.address}: "):
        child.pull(9, [server.address], 0.4)
    with pytest.raises(TimeoutError, match="waited 0.3 s .*127.0.0.1:9: "):
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
        waiting = pool.submit(child.pull, 99, [server.address], HANG_S)
        time.sleep(0.2)
        child.close()
        with pytest.raises(WeightTransferError, match="stopped"):
            waiting.result(HANG_S)


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
