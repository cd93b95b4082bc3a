"""A full version to one worker, beside a bare gRPC stream under the same TLS.

Both move the same bytes from the same process, in turn, so that a busy machine is busy for both.
CPU seconds are those of both ends together: on two cores they bound the rate, and other work on the
machine changes them little.
"""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence

from services.bench.peers import BARE_METHOD, MIB, RUN_ID, Peer, learner
from services.bench.table import table
from services.channel import open_channel
from services.tls import Credentials, RunAuthority
from services.weight_replica import Replica

STATUS = pathlib.Path("/proc/self/status")
CLEAR = pathlib.Path("/proc/self/clear_refs")
RESET_PEAK = "5"
COLD = 2
"""Pulls until memory goes round: the held version has one buffer, the coming one another."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent:
    """What one transfer took."""

    seconds: float
    cpu_s: float
    """Of both processes."""
    peak_bytes: int
    """Resident memory of this process, its largest minus that before."""


def measure(mib: int, rounds: int, streams: int, chunk_bytes: int) -> str:
    """Returns the table.

    The first pull gets fresh memory from the system; the rounds use what the version before last
    has left, as a worker does for its whole run.
    """
    credentials = RunAuthority.create(RUN_ID).issue("bench")
    bare: list[Spent] = []
    pulls: list[Spent] = []
    with (
        Peer(learner, credentials, mib, chunk_bytes, False) as peer,
        Replica(credentials, run_id=RUN_ID, streams=streams, deltas=False) as replica,
    ):
        address, bare_address = peer.hello
        for version in range(rounds + COLD):
            peer.ask("publish", version, 0.0)
            bare.append(_spent(peer, lambda: _take_bare(bare_address, credentials, mib * MIB)))
            pulls.append(_spent(peer, lambda: replica.pull(version, [address], 600)))  # noqa: B023
    rows = [
        ("bare stream", *_columns(bare[COLD:], mib), "", ""),
        (
            "pull, digests included",
            *_columns(pulls[COLD:], mib),
            f"{_ratio(bare[COLD:], pulls[COLD:]):.2f}",
            f"{max(one.peak_bytes for one in pulls[COLD:]) / MIB / streams:.1f}",
        ),
        (
            "first pull, fresh memory",
            *_columns(pulls[:1], mib),
            f"{_ratio(bare[:1], pulls[:1]):.2f}",
            f"{(pulls[0].peak_bytes / MIB - mib) / streams:.1f}",
        ),
    ]
    heads = ("", "seconds", "GB/s", "best GB/s", "CPU s", "of bare", "extra MiB a stream")
    title = (
        f"{mib} MiB of bfloat16, mutual TLS, loopback, {streams} streams, messages of "
        f"{chunk_bytes // 1024} KiB, median of {rounds} rounds"
    )
    return table(title, heads, rows)


def _columns(spent: Sequence[Spent], mib: int) -> tuple[str, ...]:
    seconds = [one.seconds for one in spent]
    rates = (mib * MIB / 1e9 / s for s in (statistics.median(seconds), min(seconds)))
    cpu_s = statistics.median(one.cpu_s for one in spent)
    return f"{statistics.median(seconds):.3f}", *(f"{rate:.2f}" for rate in rates), f"{cpu_s:.2f}"


def _ratio(bare: Sequence[Spent], pulls: Sequence[Spent]) -> float:
    """Median of the rates' ratio, round by round."""
    return statistics.median(b.seconds / p.seconds for b, p in zip(bare, pulls, strict=True))


def _spent(peer: Peer, transfer: Callable[[], object]) -> Spent:
    CLEAR.write_text(RESET_PEAK)
    resident = _status_bytes("VmRSS")
    theirs_s, ours_s = peer.ask("spent")[0], time.process_time()
    start_s = time.perf_counter()
    transfer()
    seconds = time.perf_counter() - start_s
    peak = _status_bytes("VmHWM")
    ours_s = time.process_time() - ours_s
    return Spent(
        seconds=seconds,
        cpu_s=ours_s + peer.ask("spent")[0] - theirs_s,
        peak_bytes=peak - resident,
    )


def _take_bare(address: str, credentials: Credentials, nbytes: int) -> None:
    """Takes in the bare stream and drops it."""
    with open_channel(address, credentials) as channel:
        got = sum(map(len, channel.unary_stream(BARE_METHOD)(b"", timeout=600)))
    if got != nbytes:
        raise ValueError(f"the bare stream had {got} bytes, the version has {nbytes}")


def _status_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
