"""The command line of the benches; each prints one table."""

import argparse
from collections.abc import Sequence

from benchmarks.transfer import pull, random_delta, relay

SHARES = (0.0, 0.001, 0.01, 0.03, 0.1, 0.3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses, runs one bench, prints."""
    options = _parser().parse_args(arguments)
    print(options.bench(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.bench", description=__doc__)
    benches = parser.add_subparsers(required=True)

    one = benches.add_parser("pull", help="a full version to one worker, beside a bare stream")
    one.set_defaults(
        bench=lambda given: pull.measure(
            given.mib, given.rounds, given.streams, given.chunk_kib * 1024
        )
    )
    one.add_argument("--mib", type=_positive, default=1024, help="size of a version")
    one.add_argument("--rounds", type=_positive, default=5, help="of bare stream and pull in turn")
    one.add_argument("--streams", type=_positive, default=2, help="connections of the pull")
    one.add_argument("--chunk-kib", type=_positive, default=1024, help="message of both")

    many = benches.add_parser("relay", help="what the learner sends when many workers pull at once")
    many.set_defaults(bench=lambda given: relay.measure(given.workers, given.mib, given.fanout))
    many.add_argument("--workers", type=_positive, default=8)
    many.add_argument("--mib", type=_positive, default=64, help="size of a version")
    many.add_argument("--fanout", type=int, default=2, help="children of each; 0: no relays")

    small = benches.add_parser("delta", help="size and speed of deltas by the share that changed")
    small.set_defaults(bench=lambda given: random_delta.measure(given.mib, given.shares))
    small.add_argument("--mib", type=_positive, default=256, help="size of a version")
    small.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of elements")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
