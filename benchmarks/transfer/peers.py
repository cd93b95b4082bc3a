"""The other processes of a bench: a learner that publishes, and workers that pull.

A process answers one command at a time over a pipe, so that the bench controls the sequence.
"""

import concurrent.futures
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import ml_dtypes
import numpy as np

from services.weights.replica import PullStats, Replica
from services.weights.service import weight_service
from services.weights.store import WeightStore
from services.wire.server import SERVER_OPTIONS, Server
from services.wire.tls import Credentials

RUN_ID = "bench"
ANSWER_S = 600.0
"""Longest answer of a process."""
BARE_METHOD = "/bench.Bare/Stream"
MIB = 2**20
LARGEST_TENSOR_BYTES = 32 * MIB


def bf16_tensors(mib: int, seed: int = 0) -> dict[str, np.ndarray]:
    """bfloat16 tensors of `mib` MiB in all, normal with deviation 0.02, of several sizes as in a
    language model.
    """
    rng = np.random.default_rng(seed)
    left, tensors = mib * MIB, {}
    while left:
        nbytes = min(left, LARGEST_TENSOR_BYTES >> (len(tensors) % 4))
        block = rng.normal(0, 0.02, size=nbytes // 2).astype(np.float32)
        tensors[f"layers.{len(tensors)}.weight"] = block.astype(ml_dtypes.bfloat16).reshape(-1, 512)
        left -= nbytes
    return tensors


def change(tensors: dict[str, np.ndarray], share: float, seed: int) -> None:
    """Flips the last bit of this share of all elements, drawn at random, in place."""
    rng = np.random.default_rng(seed)
    for tensor in tensors.values():
        bits = tensor.view(np.uint16).reshape(-1)
        bits ^= (rng.random(bits.shape, np.float32) < share).astype(np.uint16)


class Peer:
    """A process of the bench; a context manager."""

    def __init__(self, target: Callable[..., None], *arguments: object):
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.hello = self.answer()
        """What the process sent when it was ready."""

    def ask(self, *command: object) -> Any:
        """Sends a command and returns its answer."""
        self.send(*command)
        return self.answer()

    def send(self, *command: object) -> None:
        """Sends a command; `answer` returns what it answers."""
        self._pipe.send(command)

    def answer(self) -> Any:
        """The next answer of the process.

        Raises:
            TimeoutError: after ANSWER_S.
        """
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"waited {ANSWER_S:g} s for {self._process.name} of the bench")
        return self._pipe.recv()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def learner(
    pipe: multiprocessing.connection.Connection,
    credentials: Credentials,
    mib: int,
    chunk_bytes: int,
    deltas: bool,
) -> None:
    """Serves versions, and the newest one's bytes also as a bare stream.

    Says (address, address of the bare stream). Commands: ("publish", version, share of elements
    that change before), and ("spent",), answered by its CPU seconds and the bytes it sent.
    """
    store = WeightStore(RUN_ID, keep_versions=2 if deltas else 1, deltas=deltas)
    tensors = bf16_tensors(mib)
    bare, bare_port = _bare_server(store, credentials)
    with Server(credentials, [weight_service(store, chunk_bytes=chunk_bytes)]) as server:
        pipe.send((server.address, f"127.0.0.1:{bare_port}"))
        for command in _commands(pipe):
            if command[0] == "publish":
                _, version, share = command
                change(tensors, share, version)
                store.publish(version, tensors)
            pipe.send((time.process_time(), store.egress_bytes))
    bare.stop(0)


def worker(pipe: multiprocessing.connection.Connection, credentials: Credentials) -> None:
    """Pulls and relays. Says its address. Command: (version, sources)."""
    with Replica(credentials, run_id=RUN_ID) as replica:
        pipe.send(replica.address)
        for version, sources in _commands(pipe):
            pipe.send(_pulled(replica, version, sources))


def _pulled(replica: Replica, version: int, sources: Sequence[str]) -> PullStats:
    return replica.pull(version, sources, ANSWER_S).stats


def _commands(pipe: multiprocessing.connection.Connection):
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def _bare_server(store: WeightStore, credentials: Credentials) -> tuple[grpc.Server, int]:
    """Streams the newest version as raw messages of the size asked for: no offsets, no checks."""

    def stream(request: bytes, context: grpc.ServicerContext):
        manifest = store.wait_for_version().manifest
        data = store.read(manifest.policy_version, 0, manifest.nbytes)
        chunk_bytes = int(request)
        for start in range(0, len(data), chunk_bytes):
            yield data[start : start + chunk_bytes]

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), options=SERVER_OPTIONS)
    service, method = BARE_METHOD.strip("/").split("/")
    handler = grpc.unary_stream_rpc_method_handler(stream, response_serializer=bytes)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {method: handler})]
    )
    tls = grpc.ssl_server_credentials(
        [(credentials.key_pem, credentials.cert_pem)],
        root_certificates=credentials.ca_pem,
        require_client_auth=True,
    )
    port = server.add_secure_port("127.0.0.1:0", tls)
    server.start()
    return server, port
