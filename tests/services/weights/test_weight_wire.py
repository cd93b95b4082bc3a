"""Weights over real sockets: everything arrives bit for bit, or the worker keeps what it has."""

import dataclasses
import itertools
import multiprocessing
import re

import ml_dtypes
import numpy as np
import pytest

from services.pb import weights_pb2, weights_pb2_grpc
from services.weights.client import WeightClient
from services.weights.digest import tree_digest
from services.weights.replica import Replica
from services.weights.store import WeightStore
from services.weights.transfer import WeightTransferError
from services.wire.channel import open_channel
from services.wire.server import THREADS
from tests.deadlines import HANG_S
from tests.services.weights.weight_tools import QUESTION_BYTES, fetch, newest_manifest
from tests.services.wire_tools import TcpProxy, fetch_for_ever, finish, hold, reset, serve_for_ever

pytestmark = pytest.mark.slow

RUN_ID = "run-a"
TENSORS = 6
TENSOR_BYTES = 128 * 1024
CHUNK_BYTES = 32 * 1024


def version(seed: int) -> dict[str, np.ndarray]:
    """Six bf16 tensors of 128 KiB."""
    rng = np.random.default_rng(seed)
    shape = (TENSOR_BYTES // 2 // 64, 64)
    return {
        f"layers.{index}.weight": rng.normal(size=shape).astype(ml_dtypes.bfloat16)
        for index in range(TENSORS)
    }


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return tree_digest(left) == tree_digest(right)


class Worker:
    """What a rollout worker does with weights: swap after a whole verified version, else keep."""

    def __init__(self, address, credentials, **options):
        self.client = WeightClient(address, credentials, run_id=RUN_ID, **options)
        self.version, self.weights = 4, version(4)

    def update(self, timeout_s: float) -> None:
        manifest = newest_manifest(self.client, self.version + 1, 10)
        weights = fetch(self.client, manifest, timeout_s)
        self.version, self.weights = manifest.policy_version, weights

    def is_whole_on(self, policy_version: int) -> bool:
        return self.version == policy_version and same(self.weights, version(policy_version))


@pytest.fixture
def store():
    store = WeightStore(RUN_ID, 2)
    store.publish(5, version(5))
    return store


@pytest.mark.parametrize("streams", [1, 3])
def test_version_arrives_bit_for_bit_with_dtypes_and_shapes(serve, credentials, streams):
    special = np.frombuffer(bytes.fromhex("803fcd3d0080807f80ffc07f01007f7f0000"), "<u2")
    tensors = {
        "odd": np.arange(7, dtype=np.int8),
        "plain": np.array(2.5, np.float32),
        "special": special.view(ml_dtypes.bfloat16),
        "void": np.zeros((0, 4), np.float32),
        "wide": np.arange(6, dtype=np.float64).reshape(2, 3),
    }
    store = WeightStore(RUN_ID, 1)
    published = store.publish(0, tensors)
    client = WeightClient(serve(store=store).address, credentials, run_id=RUN_ID, streams=streams)
    manifest = newest_manifest(client, 0, 10)
    received = fetch(client, manifest, 10)
    assert manifest == published
    assert list(received) == sorted(tensors)
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
        assert received[name].tobytes() == tensor.tobytes()
        assert received[name].flags.aligned
    assert tree_digest(received)[1] == store.held(0).manifest.digest


def test_r08_received_arrays_can_be_changed_in_place(serve, credentials, store):
    client = WeightClient(serve(store=store).address, credentials, run_id=RUN_ID)
    manifest = newest_manifest(client, 0, 10)
    for tensor in fetch(client, manifest, 10).values():
        tensor[...] = 0
    assert same(fetch(client, manifest, 10), version(5))


def g01_sizes():
    return [4194303, 4194304, 4194305, 17825792, 134217729]


def test_g01_sizes_are_those_of_the_case(cases):
    assert cases("transfer")["G01"]["input"]["payload_bytes"] == g01_sizes()


@pytest.mark.parametrize("nbytes", g01_sizes())
def test_g01_tensor_of_any_size_arrives(serve, credentials, nbytes):
    tensor = np.arange(nbytes, dtype=np.uint32).astype(np.uint8)
    store = WeightStore(RUN_ID, 1)
    store.publish(0, {"t": tensor})
    client = WeightClient(serve(store=store).address, credentials, run_id=RUN_ID)
    assert np.array_equal(fetch(client, newest_manifest(client, 0, 10), 60)["t"], tensor)


def update_until_cut(worker: Worker, proxy: TcpProxy, timeout_s: float) -> str:
    """Updates until one gets as far as the cut; returns the message of its error."""
    while True:
        with pytest.raises((WeightTransferError, TimeoutError)) as error:
            worker.update(timeout_s)
        assert worker.is_whole_on(4)
        if proxy.reached.is_set():
            return str(error.value)


CUTS = pytest.mark.parametrize("after_tensor", [0, 3, 5])


@CUTS
@pytest.mark.parametrize("cut", [reset, finish])
def test_g06_connection_cut_once_goes_on(serve, credentials, store, after_tensor, cut):
    server = serve(store=store, chunk_bytes=CHUNK_BYTES)
    limit = 6000 + after_tensor * TENSOR_BYTES + 1000
    limits = itertools.chain([limit], itertools.repeat(None))
    with TcpProxy(server.port, limits, cut, QUESTION_BYTES) as proxy:
        worker = Worker(proxy.address, credentials, streams=1)
        worker.update(HANG_S)
        assert worker.is_whole_on(5)
        assert proxy.reached.is_set() and proxy.connections >= 3


@CUTS
def test_g06_connection_reset_again_and_again_leaves_the_old_version(
    serve, credentials, store, after_tensor
):
    server = serve(store=store, chunk_bytes=CHUNK_BYTES)
    limits = itertools.chain([6000 + after_tensor * TENSOR_BYTES], itertools.repeat(3000))
    with TcpProxy(server.port, limits, reset, QUESTION_BYTES) as proxy:
        worker = Worker(proxy.address, credentials, streams=1)
        message = update_until_cut(worker, proxy, 0.7)
        assert re.search(f"{proxy.address}.*waited 0.7 s", message)
        assert re.search(r"first in 'layers\.\d\.weight'", message)
        proxy.heal()
        worker.update(HANG_S)
        assert worker.is_whole_on(5)


@CUTS
def test_g06_learner_killed_in_mid_stream_leaves_the_old_version(
    serve, authority, credentials, store, after_tensor
):
    spawn = multiprocessing.get_context("spawn")
    ports = spawn.Queue()
    args = (authority.issue("learner"), RUN_ID, 5, version(5), CHUNK_BYTES, ports)
    learner = spawn.Process(target=serve_for_ever, args=args)
    learner.start()
    limit = 6000 + after_tensor * TENSOR_BYTES
    limits = itertools.repeat(limit)
    with TcpProxy(ports.get(timeout=HANG_S), limits, hold, QUESTION_BYTES) as proxy:
        worker = Worker(proxy.address, credentials, streams=1)
        manifest = newest_manifest(worker.client, 5, HANG_S)
        proxy.on_limit = learner.kill
        assert proxy.address in update_until_cut(worker, proxy, 1.0)
        learner.join(HANG_S)
        proxy.target_port = serve(store=store).port
        proxy.heal()
        worker.update(HANG_S)
        assert worker.is_whole_on(5) and manifest.policy_version == 5


def test_g06_worker_killed_in_mid_stream_leaves_the_learner_serving(serve, credentials, store):
    server = serve(store=store, chunk_bytes=CHUNK_BYTES)
    spawn = multiprocessing.get_context("spawn")
    limits = itertools.repeat(4 * TENSOR_BYTES)
    with TcpProxy(server.port, limits, hold, QUESTION_BYTES) as proxy:
        args = (proxy.address, credentials, RUN_ID)
        dying = spawn.Process(target=fetch_for_ever, args=args)
        dying.start()
        assert proxy.reached.wait(HANG_S)
        dying.kill()
        dying.join(HANG_S)
    worker = Worker(server.address, credentials)
    worker.update(HANG_S)
    assert worker.is_whole_on(5)


class LyingStore(WeightStore):
    """Sends other bytes than its manifest describes."""

    def __init__(self, change):
        super().__init__(RUN_ID, 2)
        self.change = change

    def read(self, policy_version, offset, length):
        return self.change(super().read(policy_version, offset, length))


def flipped(at: int):
    def change(data: memoryview) -> memoryview:
        wrong = bytearray(data)
        wrong[at] ^= 0x10
        return memoryview(wrong)

    return change


@CUTS
def test_g06_flipped_byte_is_found_and_named(serve, credentials, after_tensor):
    store = LyingStore(flipped(after_tensor * TENSOR_BYTES + 77))
    store.publish(5, version(5))
    worker = Worker(serve(store=store).address, credentials)
    with pytest.raises(WeightTransferError, match=f"checksum of .'layers.{after_tensor}.weight'"):
        worker.update(HANG_S)
    assert worker.is_whole_on(4)
    store.change = lambda data: data
    worker.update(HANG_S)
    assert worker.is_whole_on(5)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda data: data[:-1], "ended well at byte 786431"),
        (lambda data: data[:0], "ended well at byte 0"),
        (lambda data: memoryview(bytes(data) + b"x"), "got 32769 bytes|got 1 bytes"),
    ],
)
def test_g06_stream_of_the_wrong_length_is_an_error(serve, credentials, change, message):
    store = LyingStore(change)
    store.publish(5, version(5))
    worker = Worker(serve(store=store, chunk_bytes=CHUNK_BYTES).address, credentials)
    with pytest.raises(WeightTransferError, match=message):
        worker.update(HANG_S)
    assert worker.is_whole_on(4)
    store.change = lambda data: data
    worker.update(HANG_S)
    assert worker.is_whole_on(5)


@CUTS
def test_silent_connection_is_cut_and_resumes_where_it_was(serve, credentials, store, after_tensor):
    server = serve(store=store, chunk_bytes=CHUNK_BYTES)
    limit = 6000 + after_tensor * TENSOR_BYTES
    limits = itertools.chain([limit], itertools.repeat(None))
    with TcpProxy(server.port, limits, hold, QUESTION_BYTES) as proxy:
        worker = Worker(proxy.address, credentials, streams=1, chunk_timeout_s=0.4)
        worker.update(HANG_S)
        assert worker.is_whole_on(5) and proxy.connections >= 3
        overhead = proxy.connections * 4000 + 200 * TENSORS * TENSOR_BYTES // CHUNK_BYTES
        assert proxy.forwarded_bytes < TENSORS * TENSOR_BYTES + CHUNK_BYTES + overhead


def test_silent_server_ends_at_the_deadline(serve, credentials, store):
    server = serve(store=store, chunk_bytes=CHUNK_BYTES)
    limits = itertools.repeat(TENSOR_BYTES)
    with TcpProxy(server.port, limits, hold, QUESTION_BYTES) as proxy:
        worker = Worker(proxy.address, credentials, streams=2)
        with pytest.raises(WeightTransferError, match=f"waited 0.5 s for .*{proxy.address}"):
            worker.update(0.5)
        assert worker.is_whole_on(4)


def test_version_that_was_dropped_meanwhile_is_an_error_at_once(serve, credentials):
    store = WeightStore(RUN_ID, 1)
    store.publish(5, version(5))
    client = WeightClient(serve(store=store).address, credentials, run_id=RUN_ID)
    manifest = newest_manifest(client, 5, 10)
    store.publish(6, version(6))
    with pytest.raises(WeightTransferError, match=r"NOT_FOUND: policy version 5 .* are: \[6\]"):
        fetch(client, manifest, 10)


def test_manifest_waits_for_publication_and_times_out_naming_the_server(serve, credentials, store):
    server = serve(store=store)
    # How far a busy machine gets in 0.4 s: an answer that names version 5, or none.
    message = f"waited 0.4 s for policy version >= 6 from {server.address}: .*( 5|DEADLINE)"
    with Replica(credentials, run_id=RUN_ID) as replica:
        with pytest.raises(TimeoutError, match=message):
            replica.pull(6, [server.address], 0.4)
        store.publish(6, version(6))
        assert replica.pull(6, [server.address], 10).manifest.policy_version == 6


def test_client_of_another_run_is_refused(serve, credentials, store):
    client = WeightClient(serve(store=store).address, credentials, run_id="run-b")
    with pytest.raises(WeightTransferError, match="belongs to run 'run-a', the caller to 'run-b'"):
        newest_manifest(client, 0, 10)


@pytest.mark.parametrize("changes", [{"digest": "0" * 64}, {"tensors": ()}])
def test_manifest_that_lies_is_refused_before_any_transfer(serve, credentials, store, changes):
    honest = store.held(5)
    lying = WeightStore(RUN_ID, 1)
    lying.adopt(
        dataclasses.replace(honest, manifest=dataclasses.replace(honest.manifest, **changes))
    )
    client = WeightClient(serve(store=lying).address, credentials, run_id=RUN_ID)
    with pytest.raises(WeightTransferError, match="weight service .*manifest digest"):
        client.ask_manifest(0, wait_s=0.0, timeout_s=10)
    assert lying.egress_bytes == 0


def test_more_waiting_workers_than_threads_do_not_block_a_transfer(serve, credentials, store):
    server = serve(store=store)
    request = weights_pb2.GetManifestRequest(run_id=RUN_ID, min_policy_version=99, wait_s=30)
    with open_channel(server.address, credentials) as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        waiting = [stub.GetManifest.future(request, timeout=HANG_S) for _ in range(THREADS + 8)]
        worker = Worker(server.address, credentials)
        worker.update(10)
        assert worker.is_whole_on(5)
        assert sum(not call.done() for call in waiting) > 8
