"""Deltas of random changes: bytes on the wire, and seconds to make, to pull and to pull in full."""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.report_file import table
from benchmarks.transfer.peers import MIB, RUN_ID, Peer, bf16_tensors, change, learner
from services.weights.delta import encode_delta
from services.weights.digest import layout
from services.weights.replica import Replica
from services.wire.channel import PIECE_BYTES
from services.wire.tls import RunAuthority


def measure(mib: int, shares: Sequence[float]) -> str:
    """Returns the table; every share is one version more, pulled over mutual TLS."""
    credentials = RunAuthority.create(RUN_ID).issue("rollout-0")
    rows = []
    tensors = bf16_tensors(mib)
    with Peer(learner, credentials, mib, PIECE_BYTES, True) as peer:
        address = peer.hello[0]
        peer.ask("publish", 0, 0.0)
        with (
            Replica(credentials, run_id=RUN_ID) as by_delta,
            Replica(credentials, run_id=RUN_ID, deltas=False) as in_full,
        ):
            for replica in (by_delta, in_full):
                replica.pull(0, [address], 600)
            for version, share in enumerate(shares, start=1):
                encode_s = _encode_s(tensors, share, version)
                peer.ask("publish", version, share)
                small, full = (
                    replica.pull(version, [address], 600).stats for replica in (by_delta, in_full)
                )
                rows.append(
                    (
                        f"{share:g}",
                        "delta" if small.delta else "all",
                        f"{small.wire_bytes / MIB:.2f}",
                        f"{small.wire_bytes / full.wire_bytes:.4f}",
                        f"{encode_s:.2f}",
                        f"{small.seconds:.2f}",
                        f"{full.seconds:.2f}",
                    )
                )
    heads = ("changed", "sent", "MiB", "of full", "make s", "pull s", "full pull s")
    return table(f"deltas of {mib} MiB of bfloat16, last bit of random elements", heads, rows)


def _encode_s(tensors: dict[str, np.ndarray], share: float, seed: int) -> float:
    """Makes the same change as the learner will, and times its delta alone."""
    specs = layout(tensors)
    base = _stream(tensors)
    change(tensors, share, seed)
    target = _stream(tensors)
    start_s = time.perf_counter()
    encode_delta(base, target, specs)
    return time.perf_counter() - start_s


def _stream(tensors: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([tensors[name].reshape(-1).view(np.uint8) for name in sorted(tensors)])
