"""Transfers through a network that misbehaves: whole and equal, or an error in time that names who.

Case G06 (`../shared/cases/CASES.md`): a worker never holds a mix of versions.
"""

import contextlib
import itertools
import random
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from services.trajectories.client import PushFailed, TrajectoryClient, pack_group
from services.weights import transfer
from services.weights.client import WeightClient
from services.weights.digest import tree_digest
from services.weights.store import WeightStore
from services.weights.transfer import WeightTransferError
from services.wire.messages import PushOutcome
from tests.deadlines import HANG_S
from tests.fault_proxy import DOWN, FaultProxy, Rule
from tests.services.weights.weight_tools import fetch, newest_manifest
from tests.services.wire_tools import same_group

pytestmark = pytest.mark.slow

RUN_ID = "run-a"
DIGEST = "d" * 64
TENSOR_BYTES = 128 * 1024
STREAMS = 3
SLACK_S = HANG_S
"""How much later than its deadline an end may be seen: on a busy machine that is long."""


def version(seed: int) -> dict[str, np.ndarray]:
    """Six bf16 tensors of 128 KiB: more than the sockets on the way can hold."""
    rng = np.random.default_rng(seed)
    shape = (TENSOR_BYTES // 2 // 64, 64)
    return {
        f"layers.{index}.weight": rng.normal(size=shape).astype(ml_dtypes.bfloat16)
        for index in range(6)
    }


class Worker:
    """What a rollout worker does with weights: swap after a whole verified version, else keep."""

    def __init__(self, address, credentials):
        self.client = WeightClient(
            address, credentials, run_id=RUN_ID, streams=STREAMS, chunk_timeout_s=0.4
        )
        self.version, self.weights = 4, version(4)

    def update(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        manifest = newest_manifest(self.client, self.version + 1, timeout_s)
        weights = fetch(self.client, manifest, max(0.01, deadline - time.monotonic()))
        self.version, self.weights = manifest.policy_version, weights

    def is_whole_on(self, policy_version: int) -> bool:
        whole = tree_digest(self.weights) == tree_digest(version(policy_version))
        return self.version == policy_version and whole


@pytest.fixture
def store():
    store = WeightStore(RUN_ID, 2)
    store.publish(5, version(5))
    return store


@pytest.fixture
def line(serve, store, make_buffer):
    """A proxy in front of a learner with version 5 and an empty buffer, as `line.buffer`."""
    buffer = make_buffer()
    buffer.issue(0, DIGEST)
    server = serve(store=store, buffer=buffer, chunk_bytes=32 * 1024)
    with FaultProxy(server.port) as proxy:
        proxy.buffer = buffer
        yield proxy


def after_a_while(change, delay_s: float = 0.5) -> None:
    timer = threading.Timer(delay_s, change)
    timer.daemon = True
    timer.start()


SURVIVED = {
    "cut once on every connection": {n: Rule(cut_after=9000 * n) for n in range(1, 4)},
    "cut in the handshake": {n: Rule(cut_after=700) for n in range(3)},
    "stalled, shorter than a stream may be silent": {
        n: Rule(stall_after=50_000, stall_s=0.15) for n in range(4)
    },
    "stalled for ever on every first connection": {n: Rule(stall_after=40_000) for n in range(4)},
    "slow": {n: Rule(bytes_per_s=2_000_000) for n in range(4)},
    "late": {n: Rule(late_s=0.1) for n in range(4)},
    "a flipped bit in the handshake": {0: Rule(flip_at=300), 1: Rule(flip_at=900)},
}


@pytest.mark.parametrize("name", SURVIVED)
def test_g06_weights_arrive_whole_through(name, line, credentials):
    line.of_connection = {(number, DOWN): rule for number, rule in SURVIVED[name].items()}
    worker = Worker(line.address, credentials)
    worker.update(HANG_S)
    assert worker.is_whole_on(5)
    assert line.faults or name in ("slow", "late")


def test_pieces_of_several_connections_may_come_in_any_order(line, credentials, monkeypatch):
    monkeypatch.setattr(transfer, "SEGMENT_BYTES", 48 * 1024)
    line.of_connection = {(number, DOWN): Rule(late_s=0.02 * number) for number in range(1, 5)}
    worker = Worker(line.address, credentials)
    worker.update(HANG_S)
    assert worker.is_whole_on(5)
    order = [number for number in line.deliveries if number]
    changes = sum(one != other for one, other in itertools.pairwise(order))
    assert changes > 2 * len(set(order)) > 2, "pieces of different connections were interleaved"


@pytest.mark.parametrize("flip_at", [1000, 20_000, 500_000])
def test_g06_a_flipped_bit_never_becomes_a_weight(flip_at, line, credentials):
    """TLS finds it; whether the transfer goes on or ends, what is held is whole."""
    line.of_connection = {(number, DOWN): Rule(flip_at=flip_at) for number in range(1, 1 + STREAMS)}
    worker = Worker(line.address, credentials)
    with contextlib.suppress(WeightTransferError):
        worker.update(10)
    assert line.faults and worker.is_whole_on(worker.version)
    line.heal()
    if worker.version == 4:
        worker.update(10)
    assert worker.is_whole_on(5)


FATAL = {
    "cut again and again": Rule(cut_after=6000),
    "cut in every handshake": Rule(cut_after=700),
    "stalled for ever": Rule(stall_after=0),
    "far too slow": Rule(bytes_per_s=30_000),
    "a flipped bit in every connection": Rule(flip_at=7000),
}


@pytest.mark.parametrize("name", [*FATAL, "refused"])
def test_g06_a_worker_keeps_its_version_whole_and_the_error_names_the_source(
    name, line, credentials
):
    if name == "refused":
        line.refusing = True
    else:
        line.down = FATAL[name]
    worker = Worker(line.address, credentials)
    started = time.monotonic()
    with pytest.raises((WeightTransferError, TimeoutError), match=line.address):
        worker.update(0.8)
    assert time.monotonic() - started < 0.8 + SLACK_S
    assert worker.is_whole_on(4)
    assert line.faults or name == "far too slow"
    line.heal()
    worker.update(HANG_S)
    assert worker.is_whole_on(5)


def test_a_line_that_heals_in_time_costs_no_transfer(line, credentials):
    line.refusing = True
    after_a_while(line.heal)
    worker = Worker(line.address, credentials)
    worker.update(HANG_S)
    assert worker.is_whole_on(5)


@pytest.mark.parametrize("seed", range(2))
def test_g06_versions_never_mix_while_the_learner_publishes_on(seed, line, credentials, store):
    """Rules change at random during updates, and each version is gone two publications later."""
    chance = random.Random(seed)
    rules = [*SURVIVED.values(), *({n: rule for n in range(40)} for rule in FATAL.values()), {}]
    worker = Worker(line.address, credentials)
    changed = threading.Event()

    def disturb():
        newest = 5
        while not changed.wait(0.1):
            at = line.connections
            line.of_connection = {
                (at + number, DOWN): rule for number, rule in chance.choice(rules).items()
            }
            if chance.random() < 0.3 and newest < 20:
                newest += 1
                store.publish(newest, version(newest))

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        for _ in range(4):
            held, started = worker.version, time.monotonic()
            try:
                worker.update(0.7)
            except (WeightTransferError, TimeoutError) as error:
                assert line.address in str(error)
                assert worker.version == held
            assert time.monotonic() - started < 0.7 + SLACK_S
            assert worker.is_whole_on(worker.version)
    finally:
        changed.set()
        disturbing.join()
    line.heal()
    store.publish(99, version(99))
    worker.update(HANG_S)
    assert worker.is_whole_on(99)


PUSHED = {
    "cut": Rule(cut_after=30_000),
    "cut in the handshake": Rule(cut_after=300),
    "stalled": Rule(stall_after=30_000, stall_s=0.3),
    "slow": Rule(bytes_per_s=200_000),
    "late": Rule(late_s=0.2),
    "a flipped bit in the handshake": Rule(flip_at=200),
    "a flipped bit of the group": Rule(flip_at=20_000),
}


@pytest.fixture
def group(make_group, make_completion):
    """Of 80 KB, so that offsets lie inside."""
    T = 10_000
    numbers = np.arange(T)
    completion = make_completion(
        token_ids=(numbers % 369).astype(np.int32),
        behavior_logprobs=-(numbers % 41).astype(np.float32),
    )
    return make_group(completions=(completion, make_completion(1)))


@pytest.mark.parametrize("name", PUSHED)
def test_a_group_is_taken_once_through(name, line, credentials, group):
    line.of_connection = {(0, "up"): PUSHED[name]}
    client = TrajectoryClient(line.address, credentials)
    assert client.push_group(pack_group(group), HANG_S) in (
        PushOutcome.ACCEPTED,
        PushOutcome.DUPLICATE,
    )
    client.close()
    assert line.faults or name in ("slow", "late")
    (received,) = line.buffer.take_groups(["g1"], 1).groups
    assert same_group(received, group) and line.buffer.counts().accepted == 1


LOST = {
    "cut": Rule(cut_after=30_000),
    "stalled": Rule(stall_after=30_000),
    "slow": Rule(bytes_per_s=20_000),
    "a flipped bit": Rule(flip_at=20_000),
}


@pytest.mark.parametrize("name", [*LOST, "refused", "no answer"])
def test_a_push_that_fails_says_who_and_its_repeat_counts_once(name, line, credentials, group):
    if name == "refused":
        line.refusing = True
    elif name == "no answer":
        line.down = Rule(stall_after=3000)
    else:
        line.up = LOST[name]
    client = TrajectoryClient(line.address, credentials)
    started = time.monotonic()
    with pytest.raises((TimeoutError, PushFailed), match=line.address) as error:
        client.push_group(pack_group(group), 0.8)
    assert time.monotonic() - started < 0.8 + SLACK_S and "'g1'" in str(error.value)
    line.heal()
    assert client.push_group(pack_group(group), HANG_S) in (
        PushOutcome.ACCEPTED,
        PushOutcome.DUPLICATE,
    )
    client.close()
    (received,) = line.buffer.take_groups(["g1"], 1).groups
    assert same_group(received, group) and line.buffer.counts().accepted == 1
