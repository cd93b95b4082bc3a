"""A full version to one worker, beside a bare gRPC stream under the same TLS.

Both move the same bytes from the same process, in turn, so that a busy machine is busy for both.
CPU seconds are those of both ends together: on two cores they bound the rate, and other work on the
machine changes them little.
"""

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.report_file import table
from benchmarks.transfer.peers import BARE_METHOD, MIB, RUN_ID, Peer, learner
from services.weights.replica import Replica
from services.wire.channel import open_channel
from services.wire.tls import Credentials, RunAuthority

STATUS = pathlib.Path("/proc/self/status")
CLEAR = pathlib.Path("/proc/self/clear_refs")
RESET_PEAK = "5"
LARGE_CHUNK_BYTES = 2 * MIB
"""A bare stream of such messages is shown too, as the usual advice has it."""
COLD = 2
"""Pulls before buffers are reused: the current version has one, the next version another."""


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
    credentials = RunAuthority.create(RUN_ID).issue("rollout-0")
    bare: dict[int, list[Spent]] = {size: [] for size in sorted({chunk_bytes, LARGE_CHUNK_BYTES})}
    pulls: list[Spent] = []
    with (
        Peer(learner, credentials, mib, chunk_bytes, False) as peer,
        Replica(credentials, run_id=RUN_ID, streams=streams, deltas=False) as replica,
    ):
        address, bare_address = peer.hello
        take = functools.partial(_take_bare, bare_address, credentials, mib * MIB)
        for version in range(rounds + COLD):
            peer.ask("publish", version, 0.0)
            for size, spent in bare.items():
                spent.append(_spent(peer, functools.partial(take, size)))
            pull = functools.partial(replica.pull, version, [address], 600)
            pulls.append(_spent(peer, pull))
    warm, extra = slice(COLD, None), lambda spent: spent.peak_bytes / MIB / streams
    ratios = lambda which: [f"{_ratio(spent[which], pulls[which]):.2f}" for spent in bare.values()]
    rows = [
        *((f"bare stream, {_kib(size)}", *_columns(bare[size][warm], mib)) for size in bare),
        (
            f"pull, digests included, {_kib(chunk_bytes)}",
            *_columns(pulls[warm], mib),
            f"{max(map(extra, pulls[warm])):.1f}",
            *ratios(warm),
        ),
        (
            "first pull, fresh memory",
            *_columns(pulls[:1], mib),
            f"{extra(pulls[0]) - mib / streams:.1f}",
            *ratios(slice(1)),
        ),
    ]
    heads = ["", "seconds", "GB/s", "best GB/s", "CPU s", "extra MiB a stream"]
    heads += [f"of bare {_kib(size)}" for size in bare]
    title = (
        f"{mib} MiB of bfloat16, mutual TLS, loopback, {streams} streams, median of {rounds} rounds"
    )
    return table(title, heads, [[*row, *[""] * (len(heads) - len(row))] for row in rows])


def _kib(size: int) -> str:
    return f"{size // 1024} KiB"


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


def _take_bare(address: str, credentials: Credentials, nbytes: int, chunk_bytes: int) -> None:
    """Receives the bare stream in messages of `chunk_bytes`, and discards it."""
    with open_channel(address, credentials) as channel:
        got = sum(map(len, channel.unary_stream(BARE_METHOD)(b"%d" % chunk_bytes, timeout=600)))
    if got != nbytes:
        raise ValueError(f"the bare stream sent {got} bytes, the version has {nbytes}")


def _status_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
