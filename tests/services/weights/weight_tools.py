"""Small policy versions, pulls from one server, and relays that lie."""

import concurrent.futures
import time

import ml_dtypes
import numpy as np

from services.weights.client import WeightClient
from services.weights.digest import tree_digest
from services.weights.replica import Replica
from services.weights.store import HeldVersion, WeightStore
from services.weights.transfer import Transfer, Unreachable, arrays_of
from services.wire.channel import Deadline
from services.wire.messages import WeightManifest
from services.wire.server import Server

RUN_ID = "run-a"
TENSORS = 6
TENSOR_BYTES = 128 * 1024
VERSION_BYTES = TENSORS * TENSOR_BYTES
CHUNK_BYTES = 32 * 1024
QUESTION_BYTES = 5000
"""More than a connection receives that only asks for a manifest, its handshake included."""


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


def newest_manifest(client: WeightClient, min_version: int, timeout_s: float) -> WeightManifest:
    """The manifest that a server offers, which may come up meanwhile."""
    deadline = Deadline(timeout_s, f"policy version >= {min_version} from {client.address}")
    while True:
        left_s = max(deadline.remaining_s(), 0.01)
        try:
            offer = client.ask_manifest(min_version, wait_s=0.8 * left_s, timeout_s=left_s)
        except Unreachable as error:
            if not deadline.remaining_s():
                raise deadline.error(str(error)) from error
        else:
            if offer.manifest is not None:
                return offer.manifest
            if not deadline.remaining_s():
                raise deadline.error(f"the newest is {offer.current_version}")
        time.sleep(0.05)


def fetch(
    client: WeightClient, manifest: WeightManifest, timeout_s: float
) -> dict[str, np.ndarray]:
    """The tensors of one version from one server, verified."""
    deadline = Deadline(timeout_s, f"version {manifest.policy_version} from {client.address}")
    with concurrent.futures.ThreadPoolExecutor(4) as hashing:
        transfer = Transfer(manifest, np.empty(manifest.nbytes, np.uint8), hashing)
        client.fill(transfer, deadline)
    return arrays_of(manifest, transfer.buffer)


def is_whole(replica: Replica, tensors: dict[str, np.ndarray]) -> bool:
    """Whether the newest version that the replica serves has these bits."""
    newest = replica.store.wait_for_version()
    digest = tree_digest(tensors)[1]
    raw = b"".join(tensors[name].tobytes() for name in sorted(tensors))
    return newest.manifest.digest == digest and newest.stream.tobytes() == raw


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
