"""What the dashboard costs, and how fast it is: `python -m deploy.dashboard_bench PART`.

    cost         step time of the demo with five viewers against the dashboard stopped
    viewers      memory of driver and dashboard with 200 viewers, some of them asleep
    predictions  What-if in a run of the demo in which workers go 1 -> 2 -> 3
    history      first paint, bytes and live updates of 10,000 steps x 8 workers (Chromium)

Each prints a table and a last line for machines, and exits with 1 where a goal was missed.
"""

import argparse
import sys

from benchmarks.dashboard import history, predictions, step_cost, viewers


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.dashboard_bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("cost", help="step time with viewers against without a dashboard")
    part.add_argument("--steps", type=int, default=150)
    part.add_argument("--viewers", type=int, default=5)
    part.add_argument("--block", type=int, default=5, help="steps between two changes")
    part = parts.add_parser("viewers", help="memory with many viewers")
    part.add_argument("--viewers", type=int, default=200)
    part.add_argument("--asleep", type=int, default=20, help="of them, that read nothing")
    part.add_argument("--seconds", type=float, default=60.0)
    part = parts.add_parser("history", help="a long run in the browser")
    part.add_argument("--steps", type=int, default=10_000)
    part.add_argument("--workers", type=int, default=8)
    part.add_argument("--loads", type=int, default=5, help="page loads; the median counts")
    part = parts.add_parser("predictions", help="predicted step times and what they were")
    part.add_argument("--each", type=int, default=30, help="steps with each number of workers")
    given = vars(parser.parse_args())
    part = {"cost": step_cost, "viewers": viewers, "history": history, "predictions": predictions}
    return 0 if part[given.pop("part")].measure(**given) else 1


if __name__ == "__main__":
    sys.exit(main())
